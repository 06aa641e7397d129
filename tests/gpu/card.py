"""Which cards tests may use; what they skip where there are too few. A rehearsal takes CPU ranks in their place."""

from __future__ import annotations

import os

import pytest
import torch

IS_REHEARSAL = os.environ.get("GPU_KIT_TINY") == "1" and os.environ.get("GPU_KIT_DEVICE") == "cpu"
BACKEND = "gloo" if IS_REHEARSAL else "nccl"


def needs_cards(count: int) -> pytest.MarkDecorator:
    """Skips tests where fewer cards are visible."""
    found = torch.cuda.device_count()
    is_short = found < count and not IS_REHEARSAL
    return pytest.mark.skipif(is_short, reason=f"needs {count} GPU(s), {found} visible")


def visible(count: int) -> dict[str, str]:
    """Variables of a process that sees the first cards. Those that start tests see none otherwise."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return {"CUDA_VISIBLE_DEVICES": "" if IS_REHEARSAL else ",".join(given.split(",")[:count])}
