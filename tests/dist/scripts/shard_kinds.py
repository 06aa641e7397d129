"""Trains models of several kinds, sharded or not; notes what was refused.

Usage: shard_kinds.py RANKS OUT KIND...
"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, out, kinds = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
ump.enable_multi_gpu(num_gpus=num_ranks, shard="on" if num_ranks > 1 else "off")

sys.path.append(str(Path(__file__).resolve().parents[3]))

import torch
import transformers
from common import GradientNorms, arguments
from safetensors.torch import save_file
from transformers import Trainer

from tests.helpers.cpu_fsdp import allow_cpu_ranks
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import part_of, whole_of

allow_cpu_ranks()
rank = int(os.environ.get("RANK", "0"))
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {"vocab_size": 40, "num_key_value_heads": 1, **SIZES}
draw = torch.Generator()


def made(name, config, *of_config, **values):
    return getattr(transformers, name)(getattr(transformers, config)(*of_config, **values))


def tokens(num_rows=11, limit=39):
    rows = [torch.randint(3, limit, (6,), generator=draw) for _ in range(num_rows)]
    return [{"input_ids": row, "labels": row} for row in rows]


def pictures(num_rows=11):
    return [torch.rand(3, 8, 8, generator=draw) for _ in range(num_rows)]


def llama():
    return made("LlamaForCausalLM", "LlamaConfig", **DECODER), tokens()


def t5():
    """Its encoder and its decoder have the embeddings of the whole model."""
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2}
    options = {"vocab_size": 40, "dropout_rate": 0.0, "decoder_start_token_id": 0, **sizes}
    return made("T5ForConditionalGeneration", "T5Config", **options), tokens()


def vit():
    model = made("ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4, num_labels=3, **SIZES)
    return model, [{"pixel_values": p, "labels": torch.tensor(i % 3)} for i, p in enumerate(pictures())]


def llava():
    """It names a class of CLIP that its vision tower does not have."""
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=8, **SIZES)
    text = transformers.LlamaConfig(**DECODER)
    options = {"image_token_index": 39, "vision_feature_layer": -1}
    model = made("LlavaForConditionalGeneration", "LlavaConfig", vision_config=vision, text_config=text, **options)
    before, ignored = torch.full((4,), 39), torch.full((4,), -100)
    rows = [
        {"input_ids": torch.cat([before, row["input_ids"]]), "labels": torch.cat([ignored, row["labels"]])}
        for row in tokens()
    ]
    return model, [{**row, "pixel_values": picture} for row, picture in zip(rows, pictures(), strict=True)]


class CallsInside(transformers.TrainerCallback):
    """Looks at hidden states."""

    def on_log(self, _args, state, control, model, **kwargs):
        with torch.no_grad():
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


def picky():
    rows = [{name: torch.rand(6, generator=draw) for name in ("x", "labels")} for _ in range(8)]
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


# Kinds of Llama, with what the script tells of each.
OF_LLAMA = {
    "llama": {},
    "hooked": {},
    "adafactor": {"optim": "adafactor"},
    "inner": {"callbacks": [CallsInside()]},
    "by_hand": {"trainer_class": ByHand},
    "own_backward": {"trainer_class": OwnBackward},
}
out.mkdir(parents=True, exist_ok=True)
for kind in kinds:
    torch.manual_seed(0)
    draw.manual_seed(1)
    model, rows = llama() if kind in OF_LLAMA else globals()[kind]()
    if kind == "hooked":
        model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)
    options = dict(OF_LLAMA.get(kind, {}))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    watcher = GradientNorms()
    callbacks = [watcher, *options.pop("callbacks", [])]
    settings = {"optim": options.pop("optim", "sgd"), "optim_args": "momentum=0.9", "learning_rate": 0.1}
    config = arguments(out / "checkpoints", 4, num_train_epochs=2, remove_unused_columns=False, **settings)
    facts = {"refused": ""}
    try:
        trainer_class = options.pop("trainer_class", Trainer)
        trainer = trainer_class(model, config, train_dataset=rows, callbacks=callbacks, **options)
        trainer.train()
        if kind == "vit":
            # Of weights that have one row the second rank has an empty part.
            trainer.train()
        if kind == "llama":
            # A forward pass without a backward leaves the head whole. Another Trainer finds a model that is sharded.
            trainer.evaluate(rows[:4])
            trainer.train()
            Trainer(model, config, train_dataset=rows, callbacks=callbacks).train()
    except SetupError as error:
        facts["refused"] = str(error)
        assert not watcher.norms or kind == "inner"
    else:
        after = {name: whole_of(p.detach()).clone().contiguous() for name, p in model.named_parameters()}
        if kind == "llava":
            trainer.save_model(str(out / "save_model" / kind))
            model.save_pretrained(str(out / "save_pretrained" / kind))
        facts["norms"] = watcher.norms
        facts["part"] = sum(part_of(p).numel() for p in model.parameters()) / sum(p.numel() for p in after.values())
        facts["unmoved"] = [name for name in before if torch.equal(before[name], after[name])]
        if rank == 0:
            save_file(after, out / f"{kind}.safetensors")
    (out / f"{kind}_{rank}.json").write_text(json.dumps(facts))
