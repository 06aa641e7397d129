"""The counted memory of trainings, and the peaks of the same trainings on devices.

Usage: counted.py NUM_RANKS OUT MODE KIND... A kind is one of tests/contract/test_memory_count.py. MODE "count" counts
all rows that are asked for, in one process; "ddp" and "sharded" train.
"""

import gc
import json
import os
import sys
from pathlib import Path

num_ranks, out, mode, *kinds = sys.argv[1:]
if int(num_ranks) > 1:
    import unsloth_multigpu as ump

    ump.enable_multi_gpu(num_gpus=int(num_ranks), shard="on" if mode == "sharded" else "off")

import bitsandbytes  # noqa: F401
import torch
import transformers.modeling_utils

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.contract.test_memory_count import build, trainer_of
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.shard.count import Rows
from unsloth_multigpu.shard.describe import describe
from unsloth_multigpu.shard.meta import meta_patches

# It leaves 1.2 GiB of a card free.
transformers.modeling_utils.caching_allocator_warmup = lambda *_: None
ON_CARD = {"use_cpu": False, "gradient_accumulation_steps": 2, "max_steps": 2, "disable_tqdm": True}


def counted(kind):
    """Bytes of a rank for each mode and number of ranks, without what lies outside of torch's allocator."""
    registry = PatchRegistry([patch for patch in meta_patches() if "from_pretrained" not in patch.target])
    registry.apply()
    try:
        trainer = trainer_of(build(Path(out), kind, is_meta=True), Path(out), kind, **ON_CARD)
        rows = Rows(trainer, describe(trainer))
        asked = [("ddp", 1), ("ddp", 2), ("sharded", 2)]
        found = {f"{mode} {n}": rows.forecast(mode, n) for mode, n in asked}
    finally:
        registry.undo()
    return {name: row.total - row.overhead_bytes for name, row in found.items()}


def trained(kind):
    """The peak of this rank's card."""
    folder = Path(out, f"{mode}_{num_ranks}_{os.environ.get('RANK', '0')}", kind.replace(" ", "_"))
    trainer = trainer_of(build(folder, kind, is_meta=False), folder, kind, **ON_CARD)
    trainer.model.to(trainer.args.device)
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return torch.cuda.max_memory_allocated()


torch.zeros(1, device="cuda")
found = {}
for kind in kinds:
    gc.collect()
    before = torch.cuda.memory_allocated()
    found[kind] = counted(kind) if mode == "count" else trained(kind) - before
Path(out, f"{mode}_{num_ranks}_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
