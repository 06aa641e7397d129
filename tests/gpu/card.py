"""Which cards tests use: the machine's, else CUDA devices in host memory. A rehearsal takes CPU ranks instead."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch.distributed as dist

from tests.gpu.step import Place, place_ranks
from tests.helpers import fake_cuda
from tests.helpers.fake_cuda.build import why_not

IS_REHEARSAL = os.environ.get("GPU_KIT_TINY") == "1" and os.environ.get("GPU_KIT_DEVICE") == "cpu"
IS_FAKE = not torch.cuda.device_count() and not IS_REHEARSAL and not why_not()
NUM_CARDS = 4 if IS_FAKE else torch.cuda.device_count()
NEEDS_CARD = pytest.mark.skipif(
    not (NUM_CARDS or IS_REHEARSAL), reason=f"needs a GPU, none is visible, and {why_not()}"
)
# What asks a driver, or how fast a card is, says nothing where none is: a device in host memory has neither.
HAS_DRIVER = shutil.which("nvidia-smi") is not None or IS_REHEARSAL
NEEDS_DRIVER = pytest.mark.skipif(not HAS_DRIVER, reason="needs a driver: there is no nvidia-smi")


def nccl_version() -> tuple[int, ...] | None:
    """Of the NCCL that this torch finds; None where it is built without."""
    if IS_FAKE:
        return fake_cuda.NCCL_VERSION
    return tuple(torch.cuda.nccl.version()) if dist.is_available() and dist.is_nccl_available() else None


def place_of(num_ranks: int) -> Place:
    """Where so many ranks run."""
    return Place("gloo", 0, {}) if IS_REHEARSAL else place_ranks(num_ranks, max(1, NUM_CARDS), nccl_version())


def cards(count: int) -> list[str]:
    """The first cards, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return [] if IS_REHEARSAL else given.split(",")[:count]


def of_ranks(num_ranks: int, *, guarded: bool = False) -> dict[str, str]:
    """Variables of a process whose ranks use the first cards. Those that start tests see none otherwise."""
    place = place_of(num_ranks)
    devices = fake_cuda.cards(place.num_cards, guarded=guarded) if IS_FAKE else {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(cards(place.num_cards)), **devices, **place.variables}
