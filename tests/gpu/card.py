"""Which cards tests may use: those of the machine, else CUDA devices in host memory. A rehearsal of the kit takes CPU ranks."""

from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.fake_cuda import cards
from tests.helpers.fake_cuda.build import why_not

IS_REHEARSAL = os.environ.get("GPU_KIT_TINY") == "1" and os.environ.get("GPU_KIT_DEVICE") == "cpu"
BACKEND = "gloo" if IS_REHEARSAL else "nccl"
IS_FAKE = not IS_REHEARSAL and not torch.cuda.device_count() and not why_not()


def needs_cards(count: int) -> pytest.MarkDecorator:
    """Skips tests where fewer cards are visible and none can be had in host memory."""
    found = torch.cuda.device_count()
    is_short = found < count and not IS_REHEARSAL and not IS_FAKE
    return pytest.mark.skipif(is_short, reason=f"needs {count} GPU(s), {found} visible; {why_not()}")


def visible(count: int) -> dict[str, str]:
    """Variables of a process that sees the first cards. Those that start tests see none otherwise."""
    if IS_FAKE:
        return cards(count)
    given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return {"CUDA_VISIBLE_DEVICES": "" if IS_REHEARSAL else ",".join(given.split(",")[:count])}
