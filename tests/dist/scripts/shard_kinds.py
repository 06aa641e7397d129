"""Models that are no decoders of texts, and what cannot be sharded, with their Trainers. Used by shard.py."""

import torch
import transformers
from common import Calls
from transformers import Trainer, TrainingArguments

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {"vocab_size": 40, "num_key_value_heads": 1, **SIZES}
draw = torch.Generator()


def made(name, config, *of_config, **values):
    return getattr(transformers, name)(getattr(transformers, config)(*of_config, **values))


def tokens(num_rows):
    rows = [torch.randint(3, 39, (6,), generator=draw) for _ in range(num_rows)]
    return [{"input_ids": row, "labels": row} for row in rows]


def pictures(num_rows):
    return [torch.rand(3, 8, 8, generator=draw) for _ in range(num_rows)]


def llama(num_rows):
    return made("LlamaForCausalLM", "LlamaConfig", **DECODER), tokens(num_rows)


def t5(num_rows):
    """Its encoder and its decoder have the embeddings of the whole model."""
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2}
    options = {"vocab_size": 40, "dropout_rate": 0.0, "decoder_start_token_id": 0, **sizes}
    return made("T5ForConditionalGeneration", "T5Config", **options), tokens(num_rows)


def vit(num_rows):
    model = made("ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4, num_labels=3, **SIZES)
    return model, [{"pixel_values": p, "labels": torch.tensor(i % 3)} for i, p in enumerate(pictures(num_rows))]


def llava(num_rows):
    """It names a class of CLIP that its vision tower does not have."""
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=8, **SIZES)
    text = transformers.LlamaConfig(**DECODER)
    options = {"image_token_index": 39, "vision_feature_layer": -1}
    model = made("LlavaForConditionalGeneration", "LlavaConfig", vision_config=vision, text_config=text, **options)
    before, ignored = torch.full((4,), 39), torch.full((4,), -100)
    rows = [
        {"input_ids": torch.cat([before, row["input_ids"]]), "labels": torch.cat([ignored, row["labels"]])}
        for row in tokens(num_rows)
    ]
    return model, [{**row, "pixel_values": picture} for row, picture in zip(rows, pictures(num_rows), strict=True)]


@torch.no_grad()
def look_inside(*_, model, **__):
    """At hidden states."""
    model.model(torch.tensor([[3, 4]]))


class Picky(torch.nn.Module):
    """Cannot do with one row, as a batch norm cannot."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x, labels):
        states = self.first(x)
        if len(x) < 2:
            raise ValueError("one row")
        return {"loss": ((self.second(torch.tanh(states)) - labels) ** 2).mean()}


def picky(num_rows):
    rows = [{name: torch.rand(6, generator=draw) for name in ("x", "labels")} for _ in range(num_rows)]
    return Picky(), rows


class ByHand(Trainer):
    """Its loss goes through the layers, and then through the head."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        scores = model.lm_head(model.model(inputs["input_ids"]).last_hidden_state)
        return torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


class OwnBackward(Trainer):
    """Knows nothing of accelerate."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(**self._prepare_inputs(inputs)).loss
        loss.backward()
        return loss.detach()


# Kinds of Llama, with their Trainers.
OF_LLAMA = {"llama": Trainer, "hooked": Trainer, "inner": Trainer, "by_hand": ByHand, "own_backward": OwnBackward}
KINDS = {"t5", "vit", "llava", "picky", *OF_LLAMA}


def trainer_of(kind, num_rows, args):
    torch.manual_seed(0)
    draw.manual_seed(1)
    model, rows = (llama if kind in OF_LLAMA else globals()[kind])(num_rows)
    if kind == "hooked":
        model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)
    callbacks = [Calls(on_log=look_inside)] if kind == "inner" else []
    return OF_LLAMA.get(kind, Trainer)(model, TrainingArguments(**args), train_dataset=rows, callbacks=callbacks)


def train_again(kind, trainer, watcher):
    """Trains what is sharded already."""
    if kind == "vit":
        # Of weights that have one row the second rank has an empty part.
        trainer.train()
    if kind == "llama":
        # A forward pass without a backward leaves the head whole. Another Trainer finds a model that is sharded.
        trainer.evaluate(trainer.train_dataset[:4])
        trainer.train()
        Trainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset, callbacks=[watcher]).train()
