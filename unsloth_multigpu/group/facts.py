"""Facts that must be equal on all ranks of a run, such as settings, versions, and some rows of the data."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, Subset

from unsloth_multigpu.group.random_state import kept_random_state
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.versions import SUPPORTED, installed_version
from unsloth_multigpu.wire.digest import digest_of

_MOST_ROWS = 64
# Of arrays with this many values or more, only the shape is compared.
_LARGE_ARRAY = 10_000


def facts_of_run(trainer: TrainerLike, config: MultiGPUConfig, num_accumulated: int) -> dict[str, Any]:
    """Returns settings, versions, trainable parameters and a digest of the data, for `DDPManager.check_same`.

    Versions of drivers and of CUDA are not included, because nodes may differ in those.

    Args:
        num_accumulated: Micro-batches of a step that the script asked for.
    """
    args = trainer.args
    names = ("per_device_train_batch_size", "learning_rate", "max_steps", "num_train_epochs", "seed")
    facts: dict[str, Any] = {name: getattr(args, name) for name in names}
    facts["gradient_accumulation_steps"] = num_accumulated
    shapes = [(n, tuple(p.shape)) for n, p in trainer.model.named_parameters() if p.requires_grad]
    facts["trainable parameters"] = [len(shapes), digest_of(shapes)]
    # DDP compares shapes only, and would copy the bits of a bf16 weight into an fp16 one.
    facts["parameters by dtype"] = Counter(str(p.dtype).partition(".")[2] for p in trainer.model.parameters())
    # On different GPUs a script may choose bf16 on one and fp16, with its scaled loss, on the other.
    facts["mixed_precision"] = trainer.accelerator.mixed_precision
    facts |= {f"option {name}": value for name, value in config.of_the_run().items()}
    # Without the suffix that names the CUDA version for which torch was built.
    installed = ((name, installed_version(name)) for name in ("unsloth_multigpu", *SUPPORTED))
    facts |= {f"version of {name}": version and version.partition("+")[0] for name, version in installed}
    facts["version of python"] = ".".join(platform.python_version_tuple()[:2])
    return facts | _facts_of_data(trainer.train_dataset, "samples", "sampled rows")


def facts_of_evaluation(trainer: TrainerLike) -> dict[str, Any]:
    """Returns the number of rows and a digest of the evaluation data, which may be a dict of several data sets."""
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


def num_rows(data: Any) -> int | None:
    """Returns the number of rows of a data set; None for a stream, or if rows cannot be read by their index."""
    # torch's IterableDataset has a __getitem__, which raises.
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return None
    try:
        return len(data)
    except TypeError:
        return None


def digest_of_rows(data: Any) -> str:
    """Returns a digest of up to 64 rows, evenly spread from the first to the last. Random generators are restored."""
    num = len(data)
    most = min(num, _MOST_ROWS)
    with kept_random_state():
        rows = _read(data, [i * (num - 1) // max(most - 1, 1) for i in range(most)])
    return digest_of(plain_values(rows))


def plain_values(value: Any) -> Any:
    """Returns the texts and numbers of a row. Of a large tensor or array, such as an image, only the shape.

    Of other objects, only the type's name: their text may differ between ranks, for example by a memory address.
    """
    if isinstance(value, Mapping):
        return {str(k): plain_values(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(v) for v in value]
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.tolist() if math.prod(value.shape) < _LARGE_ARRAY else list(value.shape)
    return value if isinstance(value, (str, bytes, int, float, type(None))) else type(value).__name__


def _read(data: Any, indices: Sequence[int]) -> list[Any]:
    """Reads rows. Those of a Hugging Face data set are read as stored, before its transforms draw random numbers."""
    if type(data) is Subset:
        return _read(data.dataset, [int(data.indices[i]) for i in indices])
    if hasattr(data, "with_format"):
        return list(data.with_format("arrow")[[*indices]].to_pylist()) if indices else []
    return [data[i] for i in indices]
