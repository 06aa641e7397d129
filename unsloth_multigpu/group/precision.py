"""In which precision does a device add up?"""

from __future__ import annotations

import torch


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has no 64-bit numbers, as some of Intel's GPUs."""
    if device.type == "cpu":
        return torch.float64
    properties = torch.get_device_module(device).get_device_properties(device)
    return torch.float64 if getattr(properties, "has_fp64", True) else torch.float32
