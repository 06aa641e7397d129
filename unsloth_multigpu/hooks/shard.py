"""Requests FSDP2 from Unsloth or accelerate, and patches the loading of 4-bit weights so that they can be sharded."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.part import ArgumentsLike
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.wire.process import set_variables

# Unsloth reads these at its import and in its Trainer. Values that the script has set are kept.
_UNSLOTH_VARIABLE = "UNSLOTH_FSDP2"
# "sharded": otherwise Unsloth does not shard frozen weights if a GPU can hold the model.
_UNSLOTH_LAYOUT = "UNSLOTH_FSDP2_LAYOUT"
_UNSLOTH_OFFLOAD = "UNSLOTH_FSDP2_CPU_OFFLOAD"
# transformers and accelerate set the last two for a sharded Trainer. Every later one would be sharded, too.
SHARD_VARIABLES = (
    *(_UNSLOTH_VARIABLE, _UNSLOTH_LAYOUT, _UNSLOTH_OFFLOAD),
    *("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"),
)
_LOADS = "transformers>=4.57,<6"
_UNSLOTH = "unsloth>=2026.10.9"
# The defaults of TrainingArguments(fsdp=True), written out because they may change.
_FSDP_CONFIG = {"version": 2, "reshard_after_forward": True}


def ask_unsloth_to_shard(on_close: ExitStack, *, offload: bool = False) -> None:
    """Sets the environment variables with which Unsloth shards a Trainer's model, with `offload` in host memory.

    `on_close`, when closed, restores these variables and those that other libraries set for a sharded Trainer.

    Raises:
        SetupError: The environment contradicts `offload`.
    """
    on_close.callback(set_variables, {name: os.environ.get(name) for name in SHARD_VARIABLES})
    os.environ.setdefault(_UNSLOTH_VARIABLE, "1")
    os.environ.setdefault(_UNSLOTH_LAYOUT, "sharded")
    if not offload:
        return
    value = os.environ.setdefault(_UNSLOTH_OFFLOAD, "1")
    if value.strip().lower() not in ("1", "true", "yes", "on"):  # As Unsloth reads it.
        raise SetupError(f"shard_offload=True, but {_UNSLOTH_OFFLOAD}={value!r}.", hint="Leave one of them out.")


def ask_accelerate_to_shard(args: ArgumentsLike, *, offload: bool = False) -> None:
    """Sets `TrainingArguments.fsdp`, unless the script has set it or Unsloth shards the model.

    With `offload`, the shards are kept in host memory, also if the script has set `fsdp`.

    Raises:
        SetupError: The script's `fsdp_config` contradicts `offload`.
    """
    if "unsloth" in sys.modules:
        return
    has_asked = bool(getattr(args, "fsdp", None))
    if has_asked and not offload:
        return
    given = args.fsdp_config or {}
    if isinstance(given, str):  # The name of a file.
        given = json.loads(Path(given).read_text(encoding="utf-8"))
    config = {**given} if has_asked else {**_FSDP_CONFIG, **given}
    if offload and not config.setdefault("cpu_offload", True):
        raise SetupError(
            "shard_offload=True, but fsdp_config of TrainingArguments says cpu_offload=False.",
            hint="Leave one of them out.",
        )
    args.fsdp = args.fsdp or True
    args.fsdp_config = config


@dataclass(frozen=True)
class ShardedLoading:
    """Patches for loading a model that will be sharded: each rank keeps only its rows of a 4-bit weight.

    Args:
        device: The rank's `torch.device`.
        num_ranks: Number of ranks over which the model is sharded.
    """

    device: Any
    rank: int
    num_ranks: int

    def patches(self) -> list[Patch]:
        """Returns the patches of PEFT, Unsloth and transformers."""
        engine = "unsloth.models.fsdp2_native"
        quantizer = "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer"
        config = "transformers.utils.quantization_config:BitsAndBytesConfig"
        weights = "transformers.integrations.bitsandbytes"
        patch = functools.partial(Patch, optional=True)
        return [
            patch("peft.tuners.lora.bnb:Linear4bit.merge", "peft>=0.18", _refuse_merge),
            patch(f"{engine}:_shard_device", _UNSLOTH, self._device_of_rank, needs=("model",)),
            patch(f"{engine}:shard_model", _UNSLOTH, self._shard_as_loaded, needs=("model",)),
            patch(f"{config}.post_init", _LOADS, _store_in_float_dtype),
            patch(f"{quantizer}.update_device_map", _LOADS, _in_host_memory),
            patch(f"{quantizer}._process_model_after_weight_loading", _LOADS, self._placed),
            patch(f"{weights}:Bnb4bitQuantize.convert", _LOADS, self._keep_rows, needs=("input_dict",)),
            patch(f"{weights}:Bnb4bitDeserialize.convert", _LOADS, self._keep_rows, needs=("input_dict",)),
        ]

    def _device_of_rank(self, original: Callable[..., Any], /, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Accepts 4-bit weights in host memory: FSDP2 moves them to the GPU layer by layer."""
        from unsloth_multigpu.shard.quantized import partial_layers, restore_states

        layers = partial_layers(model)
        restore_states(layers)
        return self.device if layers else original(model, *args, **kwargs)

    def _shard_as_loaded(self, original: Callable[..., Any], /, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Checks that FSDP2 assigns to a rank the rows of 4-bit weights that it has loaded."""
        from unsloth_multigpu.shard.quantized import check_rows, partial_layers

        layers = partial_layers(model)
        result = original(model, *args, **kwargs)
        check_rows(layers, self.rank, self.num_ranks)
        return result

    def _placed(self, original: Callable[..., Any], quantizer: Any, /, model: Any, **kwargs: Any) -> Any:
        """Sets the device map to the rank's device: accelerate refuses to train a 4-bit model on another."""
        model = original(quantizer, model, **kwargs)
        model.hf_device_map = {"": self.device}
        return model

    def _keep_rows(
        self, original: Callable[..., Any], step: Any, /, input_dict: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Keeps only this rank's rows of each 4-bit weight, as soon as the weight is read."""
        from unsloth_multigpu.shard.quantized import keep_rows

        # The weight is quantized on the device, as in one process.
        tensors = {name: values if isinstance(values, list) else [values] for name, values in input_dict.items()}
        moved = {name: [value.to(self.device) for value in values] for name, values in tensors.items()}
        found: dict[str, Any] = original(step, moved, *args, **kwargs)
        storage = step.hf_quantizer.quantization_config.bnb_4bit_quant_storage
        for name, weight in found.items():
            if getattr(weight, "bnb_quantized", False):
                found[name] = keep_rows(weight, storage, self.device, self.rank, self.num_ranks)
            else:  # A norm or an embedding of a quantized checkpoint stays in host memory.
                found[name] = input_dict[name]
        return found


def _refuse_merge(original: Callable[..., Any], /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses to merge an adapter into a shard of a 4-bit weight: PEFT's error would not name the cause."""
    from unsloth_multigpu.group.shards import is_sharded

    if is_sharded(self.get_base_layer().weight):
        raise SetupError(
            "An adapter can be merged only into whole weights, and each rank has only a shard of these 4-bit weights.",
            hint="Call save_pretrained() on all ranks. Then, in one process: load the model in 16 bits, and "
            "PeftModel.from_pretrained(model, adapter).merge_and_unload().",
        )
    return original(self, *args, **kwargs)


def _store_in_float_dtype(original: Callable[..., None], /, self: Any) -> None:
    """Stores 4-bit weights in a floating-point dtype: FSDP2 does not shard integers."""
    original(self)
    # Unsloth sets this itself. A floating-point dtype of the script is kept. uint8 is the default.
    if self.load_in_4bit and not self.bnb_4bit_quant_storage.is_floating_point and "unsloth" not in sys.modules:
        self.bnb_4bit_quant_storage = self.bnb_4bit_compute_dtype


def _in_host_memory(original: Callable[..., Any], quantizer: Any, /, device_map: Any) -> dict[str, str]:
    """Keeps 4-bit weights in host memory until they are sharded: a GPU may be too small for all of them."""
    return {"": "cpu"}
