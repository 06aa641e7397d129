"""What a step of two sharded CPU ranks costs, in seconds of the ranks' own threads, with and without the planner.

Usage: UNSLOTH_MULTIGPU_BALANCE=off python shard_planner.py, and the same with "auto".
Ranks meet in every micro-batch: a step takes the sum, over its micro-batches, of the costliest rank's time.
"""

import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2, shard="on")

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[3]))
from tests.helpers.cpu_fsdp import allow_cpu_ranks

allow_cpu_ranks()
STEPS, BATCH, ACCUMULATION, WARM_UP = 12, 4, 4, 2
torch.manual_seed(0)
lengths = torch.empty(STEPS * BATCH * ACCUMULATION).log_normal_(4.0, 0.9).clamp(8, 512).int().tolist()
rows = [{"input_ids": [1 + i % 250 for i in range(n)]} for n in lengths]
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


def collate(features):
    ids = [torch.tensor(f["input_ids"]) for f in features]

    def padded(tensors, value):
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    return {
        "input_ids": padded(ids, 0),
        "labels": padded(ids, -100),
        "attention_mask": padded([torch.ones_like(t) for t in ids], 0),
    }


class Timed(Trainer):
    """Notes the seconds of this thread in each micro-batch: a wait for the other rank takes none."""

    seconds: dict[int, list[float]] = {}  # noqa: RUF012

    def training_step(self, *args, **kwargs):
        begin = time.thread_time()
        loss = super().training_step(*args, **kwargs)
        self.seconds.setdefault(self.state.global_step, []).append(time.thread_time() - begin)
        return loss


arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=ACCUMULATION,
    num_train_epochs=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Timed(model, arguments, train_dataset=rows, data_collator=collate)
trainer.train()
of_ranks = [None, None]
dist.all_gather_object(of_ranks, trainer.seconds)
steps = range(WARM_UP, STEPS)
if dist.get_rank() == 0:
    waited = [sum(map(max, zip(*(rank[step] for rank in of_ranks), strict=True))) for step in steps]
    computed = [sum(sum(rank[step]) for rank in of_ranks) / 2 for step in steps]
    print(f"a step: {sum(waited) / len(steps):.3f} s, of which a rank computes {sum(computed) / len(steps):.3f} s")
