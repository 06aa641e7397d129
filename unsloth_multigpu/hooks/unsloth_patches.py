"""Patches that load models on the rank's device, and give each rank its own files for weights on disk."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.patching import Patch

logger = get_logger(__name__)

_LOADERS = {
    "unsloth.models.loader:FastLanguageModel.from_pretrained": "unsloth>=2026.10.7",
    "unsloth.models.loader:FastModel.from_pretrained": "unsloth>=2026.10.7",
    "transformers.modeling_utils:PreTrainedModel.from_pretrained": "transformers>=4.57,<6",
}
# Device maps with which one process splits a model over all visible GPUs.
_SPLITTING = ("auto", "balanced", "balanced_low_0", "sequential", "unsloth", "unsloth_balanced")
# Device maps that leave the choice of the device to the library.
_AUTOMATIC = (*_SPLITTING, *KINDS)
_OFF_DEVICE = {"cpu", "meta", "disk"}


@dataclass(frozen=True)
class Placement:
    """Loads models on the device of the rank.

    Args:
        device_type: "cuda", "xpu" or "cpu".
        device_index: Index of the rank's device.
        rank: The global rank, because nodes may share a folder.
        num_ranks: Number of ranks of the run.
        shards: The model is sharded over the ranks; a device map that splits it is then not used.
    """

    device_type: str
    device_index: int
    rank: int = 0
    num_ranks: int = 1
    shards: bool = False

    def patches(self) -> list[Patch]:
        """Returns patches of functions that load models (except on CPU ranks) or write trained embeddings to a file."""
        loaders = {} if self.device_type == "cpu" else _LOADERS
        found = [Patch(target, supports, self._placed, optional=True) for target, supports in loaders.items()]
        if self.num_ranks > 1:
            target, needs = "unsloth.models._utils:offload_to_disk", ("name", "temporary_location")
            found.append(Patch(target, "unsloth>=2026.10.7", self._offloaded_apart, needs=needs, optional=True))
        return found

    def _placed(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Loads the model on the rank's device, in place of GPU 0 or of all GPUs, which are for one process."""
        given = kwargs.get("device_map")
        is_splitting, places = str(given) in _SPLITTING, _places(given)
        if self.shards and (is_splitting or (len(places) > 1 and not places & _OFF_DEVICE)):
            kwargs["device_map"] = {"": self.device_index}
            logger.info("device_map=%r is not used: FSDP2 divides each layer between the ranks", given)
        elif given is not None:
            kwargs["device_map"] = local_device_map(given, self.device_type, self.device_index)
        # In one process such a device map splits the model.
        if self.num_ranks > 1 and self.rank == 0 and not self.shards and is_splitting:
            logger.warning(
                "device_map=%r does not split the model here: each rank loads the whole model on its own GPU. If it "
                "does not fit, enable_multi_gpu(shard='auto') or shard='on' divides it between the ranks",
                given,
            )
        with self._explained():
            return original(*args, **kwargs)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds figures and advice to the error that is raised if the model does not fit the rank's device."""
        import torch

        from unsloth_multigpu.step.out_of_memory import explain, filled, loading_advice, num_refused

        device = torch.device(self.device_type, self.device_index)
        before = num_refused(device)
        try:
            yield
        except RuntimeError as error:
            # If converting a weight fails, transformers raises another error, without the cause.
            if num_refused(device) > before:
                hint = loading_advice(self.num_ranks, shards=self.shards)
                explain(error, rank=self.rank, device=device, place=f"loading the model ({filled(device)})", hint=hint)
            raise

    def _offloaded_apart(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Writes one file per rank. In a shared file, which other ranks have mapped, it would change their weights."""
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        # Also the name: for a model in a folder, Unsloth writes into that folder.
        given.arguments["name"] = f"{given.arguments['name']}_rank_{self.rank}"
        given.arguments["temporary_location"] = f"{given.arguments['temporary_location']}/rank_{self.rank}"
        return original(*given.args, **given.kwargs)


def local_device_map(device_map: Any, device_type: str, device_index: int) -> Any:
    """Translates the `device_map` of a one-GPU script to the rank's device.

    Returns:
        `{"": device_index}`; the map itself if it names no device; a map with both for parts on the CPU or disk.

    Raises:
        ConfigError: The map names another device than the rank's.
    """
    places = _places(device_map)
    on_device = places - _OFF_DEVICE
    if not on_device:
        return device_map
    here = {"0", device_type, f"{device_type}:0", str(device_index), f"{device_type}:{device_index}", *_AUTOMATIC}
    if len(on_device) > 1 or not on_device <= here:
        raise ConfigError(
            f"device_map={device_map!r} names other devices than this rank's, {device_type}:{device_index}.",
            hint="Leave device_map out. If the model does not fit one GPU, shard='auto' or shard='on' divides it.",
        )
    if len(places) == 1:
        return {"": device_index}
    return {name: place if str(place) in _OFF_DEVICE else device_index for name, place in device_map.items()}


def _places(device_map: Any) -> set[str]:
    return set(map(str, device_map.values())) if isinstance(device_map, Mapping) else {str(device_map)}
