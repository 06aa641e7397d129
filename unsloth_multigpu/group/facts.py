"""What must be equal on all ranks for them to be one run."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from unsloth_multigpu.group.random_state import kept_random_state
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.versions import SUPPORTED, installed_version
from unsloth_multigpu.wire.digest import digest_of


def facts_of_run(trainer: TrainerLike, config: MultiGPUConfig, num_accumulated: int) -> dict[str, Any]:
    """Settings, versions, trainable parameters and some rows of the data: what `DDPManager.check_same` compares.

    Versions of drivers and of CUDA are not among them: nodes may differ in those.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        config: The run's options.
        num_accumulated: Micro-batches of a step that the script asked for.

    Returns:
        Name -> JSON value.
    """
    args, data = trainer.args, trainer.train_dataset
    names = ("per_device_train_batch_size", "learning_rate", "max_steps", "num_train_epochs", "seed")
    facts: dict[str, Any] = {name: getattr(args, name) for name in names}
    facts["gradient_accumulation_steps"] = num_accumulated
    # A trial of a search makes its model inside train(). The model that is there now is an earlier trial's, or None.
    if trainer.model is not None and getattr(trainer, "hp_search_backend", None) is None:
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
    # An IterableDataset of torch has a __getitem__, which raises.
    has_rows = hasattr(data, "__getitem__") and not isinstance(data, torch.utils.data.IterableDataset)
    if hasattr(data, "__len__") and has_rows:
        facts["samples"] = len(data)
        places = sorted({0, len(data) // 3, len(data) // 2, len(data) - 1}) if len(data) else []
        with kept_random_state():
            facts["sampled rows"] = {i: digest_of(plain_values(_stored_row(data, i))) for i in places}
    return facts


def _stored_row(data: Any, index: int) -> Any:
    """One row; of a Hugging Face data set as it is stored, before its transforms draw random numbers."""
    return data.with_format("arrow")[index].to_pylist() if hasattr(data, "with_format") else data[index]


def plain_values(value: Any) -> Any:
    """The texts and numbers in a row. The text of other objects may differ between ranks, for example by an address.

    Of a tensor or an array with 10,000 values or more, such as an image, only the shape.
    """
    if isinstance(value, Mapping):
        return {str(k): plain_values(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(v) for v in value]
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.tolist() if math.prod(value.shape) < 10_000 else list(value.shape)
    return value if isinstance(value, (str, bytes, int, float, type(None))) else type(value).__name__
