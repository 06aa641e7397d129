"""Writes and reads the weights of a model by the names that it has without any wrapper.

Imported inside functions only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.plain.wrap import unwrap_model
from unsloth_multigpu.words import listed

_MOST_NAMED = 5
# What torch.compile puts before the names of a module, in the midst of a model too.
_COMPILED = "_orig_mod."


def save_state_dict(model: nn.Module, path: str | os.PathLike[str], manager: DDPManager) -> None:
    """See `unsloth_multigpu.save_state_dict`."""
    target = Path(path).absolute()
    if manager.identity.world_size == 1:
        _write(model, target)
        return
    with manager.saves.visit(f"save_state_dict({os.fspath(target)!r})"):
        if manager.identity.rank == 0:
            manager.saves.write(os.fspath(target), lambda: _write(model, target))
        elif not manager.saves.follow()[0]:
            _write(model, target)  # A folder of its own, from tempfile say.


def load_state_dict(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Reads weights into a model, wrapped or not, whatever wrappers the model that was saved had.

    The file may come from `save_state_dict` or from `torch.save(model.state_dict(), path)`. Every rank reads it.

    Args:
        path: The file.

    Raises:
        ConfigError: The file does not hold exactly the tensors of this model; the model is as it was.
        OSError, pickle.UnpicklingError: It cannot be read.
    """
    stored = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(stored, Mapping):
        raise ConfigError(
            f"{os.fspath(path)!r} holds a {type(stored).__name__}; expected tensors by name.",
            hint="Save with save_state_dict(model, path).",
        )
    target = unwrap_model(model)
    own = target.state_dict()
    shapes = {name.replace(_COMPILED, ""): _shape(value) for name, value in own.items()}
    # The first that fits: a model may have a child that is really called "module".
    found = list(_peeled({name.replace(_COMPILED, ""): value for name, value in stored.items()}))
    values = next((peeled for peeled in found if set(peeled) == set(shapes)), found[-1])
    differ = sorted(
        shapes.keys() ^ values.keys() | {n for n in shapes.keys() & values if shapes[n] != _shape(values[n])}
    )
    if differ:  # torch would copy what fits before it raises.
        raise ConfigError(
            f"{os.fspath(path)!r} holds the weights of another model. Other names or shapes have: "
            f"{listed(differ, _MOST_NAMED)}.",
            hint="Build the model as it was when it was saved. Nothing was loaded.",
        )
    target.load_state_dict({name: values[name.replace(_COMPILED, "")] for name in own})


def _peeled(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The values by their names, then without one prefix of DDP after the other."""
    yield values
    while values and all(name.startswith("module.") for name in values):
        values = {name.removeprefix("module."): value for name, value in values.items()}
        yield values


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _write(model: nn.Module, path: Path) -> None:
    """Writes a file next to it and renames that: there is never half a file under the name."""
    state = {name.replace(_COMPILED, ""): value for name, value in unwrap_model(model).state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
