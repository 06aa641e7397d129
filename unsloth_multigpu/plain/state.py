"""Writes and reads the weights of a model by the names that it has without any wrapper.

Imported inside functions only.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.model import inner_name
from unsloth_multigpu.words import listed

_MOST_NAMED = 5


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
        OSError: It cannot be read.
    """
    stored = _read(path)
    own = model.state_dict()
    names = {bare_name(model, name): name for name in own}
    candidates = list(_peeled(list(stored)))
    # The first that fits: a model may have a child that is really called "module".
    peeled = next((c for c in candidates if set(c) == set(names)), None)
    if peeled is None:
        nearest = max(candidates, key=lambda c: len(set(c) & set(names)))
        missing, unexpected = sorted(set(names) - set(nearest)), sorted(set(nearest) - set(names))
        raise _other_model(path, [*_listed("missing", missing), *_listed("unexpected", unexpected)])
    values = {names[new]: stored[old] for new, old in zip(peeled, stored, strict=True)}
    # torch would copy what fits before it raises.
    shapes = {n: (tuple(own[n].shape), tuple(v.shape)) for n, v in values.items() if isinstance(v, torch.Tensor)}
    wrong = [f"{n} is {theirs} and here {ours}" for n, (ours, theirs) in shapes.items() if ours != theirs]
    if wrong:
        raise _other_model(path, _listed("shapes", wrong))
    model.load_state_dict(values)


def bare_name(model: nn.Module, name: str) -> str:
    """The name of an entry of `model.state_dict()` without the wrappers that it goes through.

    By the type of each module on the way: one that is only called "module" stays.
    """
    kept = []
    current: Any = model
    for part in name.split("."):
        # Below what is no module are names that a module has made up.
        is_module = isinstance(current, nn.Module)
        if not is_module or part != inner_name(current):
            kept.append(part)
        current = getattr(current, part, None) if is_module else None
    return ".".join(kept)


def _write(model: nn.Module, path: Path) -> None:
    """Writes a file next to it and renames that: there is never half a file under the name."""
    state = {bare_name(model, name): value for name, value in model.state_dict().items()}
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


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(
            f"{os.fspath(path)!r} is no file of weights: {str(error).splitlines()[0] if str(error) else 'it is empty'}",
            hint="Save with save_state_dict(model, path).",
        ) from error
    if not isinstance(stored, Mapping) or not all(isinstance(name, str) for name in stored):
        raise ConfigError(
            f"{os.fspath(path)!r} holds a {type(stored).__name__}; expected tensors by name.",
            hint="Save with save_state_dict(model, path).",
        )
    return stored


def _peeled(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The names as they are, then without one wrapper after the other."""
    yield names
    while names:
        if all(name.startswith("module.") for name in names):
            names = [name[len("module.") :] for name in names]
        elif any("_orig_mod." in name for name in names):
            # Parts of a model can be compiled; nothing but torch.compile uses this name.
            names = [name.replace("_orig_mod.", "") for name in names]
        else:
            return
        yield names


def _listed(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what}: {listed(names, _MOST_NAMED)}"] if names else []


def _other_model(path: str | os.PathLike[str], facts: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{os.fspath(path)!r} holds the weights of another model. {'; '.join(facts)}.",
        hint="Build the model as it was when it was saved. Nothing was loaded.",
    )
