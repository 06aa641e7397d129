"""Asks NVIDIA's driver for a card by nvidia-ml-py, where that is installed and finds one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unsloth_multigpu.overview import Gpu


class Cards:
    """The cards of this machine.

    Args:
        nvml: The module pynvml, initialised.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}

    def ask(self, device_id: str) -> Gpu | None:
        """What the driver says of the card with this UUID; None where it knows no such card."""
        nvml = self._nvml
        try:
            if device_id not in self._handles:
                name = device_id if device_id.startswith(("GPU-", "MIG-")) else f"GPU-{device_id}"
                self._handles[device_id] = nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            return None
        handle = self._handles[device_id]
        return Gpu(
            self._value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            self._value(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            self._value(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
        )

    def _value(self, read: Callable[[], Any]) -> int | None:
        """None where this card does not tell it, as parts of one do not."""
        try:
            return int(read())
        except self._nvml.NVMLError:
            return None


@contextmanager
def open_cards() -> Iterator[Cards | None]:
    """The cards, while the context is open; None without the library or the driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield Cards(pynvml)
    finally:
        pynvml.nvmlShutdown()
