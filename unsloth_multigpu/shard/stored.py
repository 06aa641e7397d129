"""Estimates the memory of a model's weights from the sizes of its files, to refuse loading what cannot fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def least_bytes(name: Any, options: Mapping[str, Any]) -> int:
    """Returns a lower bound of the memory of a model's weights after loading; 0 = not known.

    Args:
        name: A folder, or a repository whose files are in the hub's cache.
        options: The arguments of `from_pretrained`.
    """
    config = _read(name, "config.json", options)
    index = _read(name, "model.safetensors.index.json", options)
    single = _path(name, "model.safetensors", options)
    stored = int(index.get("metadata", {}).get("total_size", 0)) or (single.stat().st_size if single else 0)
    if config.get("quantization_config"):
        return stored
    stored_bits = _num_bits(config.get("dtype") or config.get("torch_dtype"))
    bits = _wanted_bits(options) or stored_bits
    return stored * bits // stored_bits if stored_bits else 0


def _wanted_bits(options: Mapping[str, Any]) -> int:
    """Returns the bits of a weight that the arguments ask for; 0 = as stored."""
    quantization = options.get("quantization_config")
    for bits in (4, 8):
        name = f"load_in_{bits}bit"
        if options.get(name) or getattr(quantization, name, False):
            return bits
    return _num_bits(options.get("dtype") or options.get("torch_dtype"))


def _num_bits(dtype: Any) -> int:
    import torch

    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return dtype.itemsize * 8 if isinstance(dtype, torch.dtype) else 0


def _read(name: Any, file: str, options: Mapping[str, Any]) -> dict[str, Any]:
    path = _path(name, file, options)
    return json.loads(path.read_text(encoding="utf-8")) if path else {}


def _path(name: Any, file: str, options: Mapping[str, Any]) -> Path | None:
    """Returns the local path of a file of the model; None if it is not on this machine."""
    file = str(Path(options.get("subfolder") or "", file))
    if Path(name, file).is_file():
        return Path(name, file)
    import huggingface_hub.errors

    try:
        options = {key: options.get(key) for key in ("cache_dir", "revision")}
        found = huggingface_hub.try_to_load_from_cache(str(name), file, **options)
    except huggingface_hub.errors.HFValidationError:  # `name` is a folder without this file.
        return None
    return Path(found) if isinstance(found, str) else None
