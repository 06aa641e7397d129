"""What must be equal on all ranks for them to be one run."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from typing import Any

from unsloth_multigpu.group.rows import digest_of_rows, num_rows
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.versions import SUPPORTED, installed_version
from unsloth_multigpu.wire.digest import digest_of


def facts_of_run(trainer: TrainerLike, config: MultiGPUConfig, num_accumulated: int) -> dict[str, Any]:
    """Settings, versions, trainable parameters and some rows of the data: what `DDPManager.check_same` compares.

    Versions of drivers and of CUDA are not among them: nodes may differ in those. `num_accumulated` are the
    micro-batches of a step that the script asked for.
    """
    args = trainer.args
    names = ("per_device_train_batch_size", "learning_rate", "max_steps", "num_train_epochs", "seed")
    facts: dict[str, Any] = {name: getattr(args, name) for name in names}
    facts["gradient_accumulation_steps"] = num_accumulated
    shapes = [(n, tuple(p.shape)) for n, p in trainer.model.named_parameters() if p.requires_grad]
    facts["trainable parameters"] = [len(shapes), digest_of(shapes)]
    # DDP compares shapes only, and sends a bf16 weight into an fp16 one bit by bit.
    facts["parameters by dtype"] = Counter(str(p.dtype).partition(".")[2] for p in trainer.model.parameters())
    # Cards of different kinds let a script choose bf16 on one and fp16, with its scaled loss, on the other.
    facts["mixed_precision"] = trainer.accelerator.mixed_precision
    facts |= {f"option {name}": value for name, value in config.of_the_run().items()}
    # Without the suffix that names the CUDA version for which torch was built.
    installed = ((name, installed_version(name)) for name in ("unsloth_multigpu", *SUPPORTED))
    facts |= {f"version of {name}": version and version.partition("+")[0] for name, version in installed}
    facts["version of python"] = ".".join(platform.python_version_tuple()[:2])
    return facts | _facts_of_data(trainer.train_dataset, "samples", "sampled rows")


def facts_of_evaluation(trainer: TrainerLike) -> dict[str, Any]:
    """Some rows of the data that a training evaluates, which may be a dict of several data sets; see `facts_of_run`."""
    args, data = trainer.args, trainer.eval_dataset
    if args.eval_strategy == "no" and not args.eval_on_start:
        return {}
    sets = {f" {name!r}": one for name, one in data.items()} if isinstance(data, Mapping) else {"": data}
    facts: dict[str, Any] = {}
    for name, one in sets.items():
        facts |= _facts_of_data(one, f"evaluation samples{name}", f"sampled evaluation rows{name}")
    return facts


def _facts_of_data(data: Any, length: str, rows: str) -> dict[str, Any]:
    num = num_rows(data)
    return {} if num is None else {length: num, rows: digest_of_rows(data)}
