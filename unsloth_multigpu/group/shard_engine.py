"""Which engine has sharded a model, or is to: Unsloth's, accelerate's or transformers'. None of them is ours."""

from __future__ import annotations

from enum import Enum
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import fsdp_modules, has_shards
from unsloth_multigpu.trainer_protocol import TrainerLike

# Set by Unsloth on a model that it has sharded.
_OF_UNSLOTH = "_unsloth_fsdp2_native"
# The first versions whose sharding was run under this package.
OLDEST = {"unsloth": "2026.10.9", "transformers": "5.17", "torch": "2.7"}


class Engine(Enum):
    """Who calls `torch.distributed.fsdp.fully_shard`."""

    UNSLOTH = "Unsloth"  # UNSLOTH_FSDP2, when the Trainer is made.
    ACCELERATE = "accelerate"  # TrainingArguments.fsdp, when the training begins.
    TRANSFORMERS = "transformers"  # DistributedConfig, when the model is loaded.


def find_engine(trainer: TrainerLike) -> Engine | None:
    """Who shards the Trainer's model; None where nobody does, or another way than FSDP2."""
    if trainer.is_fsdp_enabled:
        plugin = getattr(getattr(trainer.accelerator, "state", None), "fsdp_plugin", None)
        return Engine.ACCELERATE if getattr(plugin, "fsdp_version", 1) == 2 else None
    model = trainer.model
    if model is None or not has_shards(model) or next(fsdp_modules(model), None) is None:
        return None
    if _has_other_dimensions(model):
        return None
    return Engine.UNSLOTH if any(hasattr(m, _OF_UNSLOTH) for m in model.modules()) else Engine.TRANSFORMERS


def _has_other_dimensions(model: nn.Module) -> bool:
    """True where another parallelism, such as tensor parallelism, divides the weights as well."""
    meshes = [getattr(p, "device_mesh", None) for p in model.parameters()]
    names = {name for mesh in meshes if mesh is not None for name in mesh.mesh_dim_names or ()}
    return any(name in names for name in ("tp", "cp", "pp", "ep", "sp"))


def check_versions(*libraries: str) -> None:
    """Refuses versions that are older than any with which sharding was run.

    Raises:
        SetupError: One is older.
    """
    for library in libraries:
        try:
            installed = version(library)
        except PackageNotFoundError:
            continue
        if Version(installed) < Version(OLDEST[library]):
            raise SetupError(
                f"shard='on' needs {library}>={OLDEST[library]}, and {installed} is installed.",
                hint=f"Upgrade {library}, or leave shard out.",
            )
