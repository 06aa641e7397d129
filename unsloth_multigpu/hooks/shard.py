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

# Read by `import unsloth` and by its Trainer. A value that the script has set is kept.
_UNSLOTH_VARIABLE = "UNSLOTH_FSDP2"
# Without it Unsloth does not shard frozen weights on a card that can hold the model.
_UNSLOTH_LAYOUT = "UNSLOTH_FSDP2_LAYOUT"
_UNSLOTH_OFFLOAD = "UNSLOTH_FSDP2_CPU_OFFLOAD"
# Transformers and accelerate set the last two for a sharded Trainer, and would shard every later one.
SHARD_VARIABLES = (
    *(_UNSLOTH_VARIABLE, _UNSLOTH_LAYOUT, _UNSLOTH_OFFLOAD),
    *("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"),
)
_LOADS = "transformers>=4.57,<6"
_UNSLOTH = "unsloth>=2026.10.9"
# The defaults of TrainingArguments(fsdp=True), written out because they may change.
_FSDP_CONFIG = {"version": 2, "reshard_after_forward": True}


def ask_unsloth_to_shard(on_close: ExitStack, *, offload: bool = False) -> None:
    """Sets the environment variables by which Unsloth shards the model of its Trainer, with `offload` in host memory.

    `on_close` restores them, and those that other libraries set for a sharded Trainer, when it is closed.

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
    """Sets `TrainingArguments.fsdp`, unless the script has, or Unsloth is to shard the model.

    With `offload` the shards are kept in host memory, also if the script has set `fsdp`.

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
    """Patches that load a model for sharding: each rank keeps only its rows of a 4-bit weight.

    Args:
        device: The rank's `torch.device`.
        num_ranks: Number of ranks that share the model.
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
            patch("peft.tuners.lora.bnb:Linear4bit.merge", "peft>=0.18", _whole_only),
            patch(f"{engine}:_shard_device", _UNSLOTH, self._device_of_rank, needs=("model",)),
            patch(f"{engine}:shard_model", _UNSLOTH, self._divided_as_loaded, needs=("model",)),
            patch(f"{config}.post_init", _LOADS, _stored_as_computed),
            patch(f"{quantizer}.update_device_map", _LOADS, _in_host_memory),
            patch(f"{quantizer}._process_model_after_weight_loading", _LOADS, self._placed),
            patch(f"{weights}:Bnb4bitQuantize.convert", _LOADS, self._in_parts, needs=("input_dict",)),
            patch(f"{weights}:Bnb4bitDeserialize.convert", _LOADS, self._in_parts, needs=("input_dict",)),
        ]

    def _device_of_rank(self, original: Callable[..., Any], /, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Accepts 4-bit weights in host memory, which FSDP2 moves to the card layer by layer."""
        from unsloth_multigpu.shard.packed import give_back, in_parts

        layers = in_parts(model)
        give_back(layers)
        return self.device if layers else original(model, *args, **kwargs)

    def _divided_as_loaded(self, original: Callable[..., Any], /, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Checks that FSDP2 assigns a rank the rows of 4-bit weights that it has loaded."""
        from unsloth_multigpu.shard.packed import check_parts, in_parts

        layers = in_parts(model)
        result = original(model, *args, **kwargs)
        check_parts(layers, self.rank, self.num_ranks)
        return result

    def _placed(self, original: Callable[..., Any], quantizer: Any, /, model: Any, **kwargs: Any) -> Any:
        """Sets the device map to the rank's device: accelerate refuses to train a 4-bit model without that."""
        model = original(quantizer, model, **kwargs)
        model.hf_device_map = {"": self.device}
        return model

    def _in_parts(
        self, original: Callable[..., Any], step: Any, /, input_dict: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Keeps only this rank's rows of each 4-bit weight, as soon as the weight is read."""
        from unsloth_multigpu.shard.packed import keep_rows

        # One weight, quantized on the device, as in one process.
        tensors = {name: values if isinstance(values, list) else [values] for name, values in input_dict.items()}
        moved = {name: [value.to(self.device) for value in values] for name, values in tensors.items()}
        found: dict[str, Any] = original(step, moved, *args, **kwargs)
        storage = step.hf_quantizer.quantization_config.bnb_4bit_quant_storage
        for name, weight in found.items():
            if getattr(weight, "bnb_quantized", False):
                found[name] = keep_rows(weight, storage, self.device, self.rank, self.num_ranks)
            else:  # A norm or an embedding of a quantized checkpoint stays where it was, beside the rows.
                found[name] = input_dict[name]
        return found


def _whole_only(original: Callable[..., Any], /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses to merge an adapter into a rank's rows of a 4-bit weight: PEFT's error would not name the cause."""
    from unsloth_multigpu.group.shards import is_sharded

    if is_sharded(self.get_base_layer().weight):
        raise SetupError(
            "An adapter can be merged only into whole weights, and each rank has only its rows of these 4-bit weights.",
            hint="Call save_pretrained() on all ranks. Then, in one process: load the model in 16 bits, and "
            "PeftModel.from_pretrained(model, adapter).merge_and_unload().",
        )
    return original(self, *args, **kwargs)


def _stored_as_computed(original: Callable[..., None], /, self: Any) -> None:
    """Stores 4-bit weights in a floating-point dtype: FSDP2 shards no others."""
    original(self)
    # Unsloth sets it itself. A value of the script is kept, except uint8, which is also the default.
    if self.load_in_4bit and not self.bnb_4bit_quant_storage.is_floating_point and "unsloth" not in sys.modules:
        self.bnb_4bit_quant_storage = self.bnb_4bit_compute_dtype


def _in_host_memory(original: Callable[..., Any], quantizer: Any, /, device_map: Any) -> dict[str, str]:
    """Keeps 4-bit weights in host memory until they are sharded, since one card may not hold them."""
    return {"": "cpu"}
