"""Trains a tiny Llama and makes the ranks differ on purpose. Usage: replicas.py N PLANT [option=value ...]

PLANT: none; start (rank 1 begins with weights of its own); scale (rank 1's gradient after the all-reduce, from the
third step on); flip (one bit of one weight on the last rank after step 3); one_bucket (powersgd over gloo is let
through, which is safe for a model of one bucket); twice (the same Trainer trains a second time). Options are those of
enable_multi_gpu, and max_steps.
"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

plant = sys.argv[2]
options = {"verify_every": 2, "max_steps": 5}
for pair in sys.argv[3:]:
    key, _, text = pair.partition("=")
    options[key] = int(text) if text.isdigit() else text
max_steps = options.pop("max_steps")

ump.enable_multi_gpu(num_gpus=int(sys.argv[1]), **options)

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

rank, world_size = int(os.environ.get("RANK", "0")), int(sys.argv[1])
NORM = "model.layers.0.input_layernorm.weight"


class Plant(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        # DDP has wrapped and sent rank 0's weights by now.
        if plant == "start" and rank == 1:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "self_attn" in name:
                        parameter.add_(0.01)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if plant == "scale" and rank == 1 and state.global_step >= 2:
            model.lm_head.weight.grad.mul_(1.5)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if plant == "flip" and rank == world_size - 1 and state.global_step == 3:
            weight = dict(model.named_parameters())[NORM]
            weight.data.view(torch.int32)[5] ^= 1


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.tensor([1 + (index * 7 + i) % 63 for i in range(12)])
        return {"input_ids": ids, "labels": ids}


if plant == "one_bucket":
    import unsloth_multigpu.core.trainer as steering

    steering.check_compression = lambda *_, **__: None

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
trainer = Trainer(
    model=LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)),
    args=TrainingArguments(
        "checkpoints",
        per_device_train_batch_size=6,
        max_steps=max_steps,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="steps" if plant == "flip" else "no",
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Rows(),
    callbacks=[Plant()],
)
trainer.train()
if plant == "twice":
    trainer.train()
ddp = trainer.model_wrapped
facts = {
    "norms": [h["grad_norm"] for h in trainer.state.log_history if "grad_norm" in h],
    "ddp": {
        "find_unused_parameters": ddp.find_unused_parameters,
        "bucket_view": ddp.gradient_as_bucket_view,
    },
}
Path(f"facts_{rank}.json").write_text(json.dumps(facts))
