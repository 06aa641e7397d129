"""Patches of the process that forecasts its memory: models are created on the meta device, from their configuration.

They are applied in a child process that ends at `train()`, see `script_probe`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.shard.memory import WITHOUT_FORECAST
from unsloth_multigpu.versions import installed_version

_TRANSFORMERS = "transformers>=4.57,<6"
# Arguments of from_pretrained that concern the model and not its configuration.
_OF_WEIGHTS = ("dtype", "torch_dtype", "quantization_config")
# Arguments of `_from_config`, in addition to those of the model's `__init__`.
_OF_MODEL = ("attn_implementation", "experts_implementation")


def meta_patches() -> list[Patch]:
    """Returns patches of functions that a script calls before `train()` and that would read or move weights."""
    modeling = "transformers.modeling_utils:PreTrainedModel"
    optional = functools.partial(Patch, optional=True)
    nothing, yes = functools.partial(_replaced, None), functools.partial(_replaced, True)
    return [
        Patch(f"{modeling}.from_pretrained", _TRANSFORMERS, _from_configuration),
        Patch(f"{modeling}.cuda", _TRANSFORMERS, _unmoved),
        Patch(f"{modeling}.to", _TRANSFORMERS, _unmoved),
        optional("peft.peft_model:PeftModel.to", "peft>=0.18", _unmoved),
        # Both read values of an embedding, which are missing: for new rows, and to find untrained ones.
        optional(f"{modeling}._init_added_embeddings_weights_with_mean", _TRANSFORMERS, nothing),
        optional("unsloth_zoo.tokenizer_utils:fix_untrained_tokens", "unsloth_zoo>=2026.10.7", nothing),
        # The training is planned for other devices than this process has.
        optional("transformers.training_args:is_torch_bf16_gpu_available", _TRANSFORMERS, yes),
        optional("bitsandbytes.nn.modules:fix_4bit_weight_quant_state_from_module", "bitsandbytes>=0.46", _hands_state),
        optional("triton.runtime.jit:JITFunction.run", "triton>=3", _skips_without_values),
        optional("triton.runtime.autotuner:Autotuner.run", "triton>=3", _skips_without_values),
    ]


def _from_configuration(original: Callable[..., Any], /, cls: Any, name: Any, *_: Any, **kwargs: Any) -> Any:
    """Creates the model without weights."""
    if kwargs.get("gguf_file"):
        raise SetupError(f"{name}: the memory of a GGUF file cannot be forecast.", hint=WITHOUT_FORECAST)
    wants_info = kwargs.pop("output_loading_info", False)
    config, kwargs = _configuration(cls, name, kwargs)
    config.name_or_path = str(name)
    quantizer = _quantizer(config, kwargs.pop("quantization_config", None), kwargs)
    dtype = _dtype(config, kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None), quantizer)
    # The other arguments are about files and devices, and do not apply to a model without weights.
    taken = {*_OF_MODEL, *inspect.signature(cls.__init__).parameters}
    kwargs = {name: value for name, value in kwargs.items() if name in taken}
    model = make_model(cls, config, dtype, quantizer, **kwargs)
    return (model, {}) if wants_info else model


def make_model(cls: Any, config: Any, dtype: Any, quantizer: Any, **kwargs: Any) -> Any:
    """Creates a model on the meta device, with the quantized layers of transformers' `HfQuantizer`, if there is one."""
    import torch

    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype, **kwargs)
        if quantizer is not None:
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
            quantizer.postprocess_model(model)
            model.hf_quantizer = quantizer
    model.tie_weights()
    return model.eval()


def _configuration(cls: Any, name: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the model's configuration, and the arguments that are not part of it."""
    given = kwargs.pop("config", None)
    if hasattr(given, "to_dict"):
        config = copy.deepcopy(given)
        if "attn_implementation" in kwargs:
            config._attn_implementation = kwargs.pop("attn_implementation")
        return config, kwargs
    others = {key: value for key, value in kwargs.items() if key not in _OF_WEIGHTS}
    config, unused = cls.config_class.from_pretrained(given or name, return_unused_kwargs=True, **others)
    return config, {**unused, **{key: kwargs[key] for key in _OF_WEIGHTS if key in kwargs}}


def _quantizer(config: Any, asked: Any, kwargs: dict[str, Any]) -> Any:
    """Returns transformers' quantizer, which replaces layers; None without quantization."""
    from transformers.quantizers import AutoHfQuantizer

    bits = {name: kwargs.pop(name) for name in ("load_in_4bit", "load_in_8bit") if name in kwargs}
    if any(bits.values()):
        from transformers import BitsAndBytesConfig

        asked = BitsAndBytesConfig(**bits)
    stored = getattr(config, "quantization_config", None)
    if stored is None and asked is None:
        return None
    merged = asked if stored is None else AutoHfQuantizer.merge_quantization_configs(stored, asked)
    method = str(getattr(merged.quant_method, "value", merged.quant_method))
    if "bitsandbytes" not in method:
        raise SetupError(f"The memory of weights quantized by {method} cannot be forecast.", hint=WITHOUT_FORECAST)
    config.quantization_config = merged
    return AutoHfQuantizer.from_config(merged, pre_quantized=stored is not None)


def _dtype(config: Any, dtype: Any, torch_dtype: Any, quantizer: Any) -> Any:
    """Returns the dtype that from_pretrained would use."""
    import torch

    dtype = torch_dtype if dtype is None else dtype
    is_automatic = not (installed_version("transformers") or "").startswith("4.")
    if dtype == "auto" or (dtype is None and is_automatic):
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        if dtype is None:
            raise SetupError(
                "The model's configuration has no dtype, and its files are not read for a forecast.",
                hint=f"Give dtype= to from_pretrained. {WITHOUT_FORECAST}",
            )
    if dtype is None and quantizer is not None:
        dtype = quantizer.update_dtype(None)  # float16 for bitsandbytes.
    dtype = torch.empty(0).dtype if dtype is None else dtype  # torch's default.
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def _unmoved(original: Callable[..., Any], /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Applies a dtype and ignores devices: tensors without values cannot be moved."""
    import torch

    if not any(p.is_meta for p in self.parameters()):
        return original(self, *args, **kwargs)
    dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    return original(self, dtypes[0]) if dtypes else self


def _replaced(result: Any, *_: Any, **__: Any) -> Any:
    """Replaces a function by one that returns `result`."""
    return result


def _hands_state(original: Callable[..., Any], /, module: Any) -> None:
    """Hands the quantization state on: bitsandbytes' parameter class cannot hold a tensor without values."""
    if getattr(module.weight, "quant_state", None) is None:
        module.weight.quant_state = module.quant_state


def _skips_without_values(original: Callable[..., Any], /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Skips a kernel that would write to tensors without values, which have no memory."""
    from unsloth_multigpu.shard.fake import has_no_values

    return None if has_no_values(args, kwargs) else original(self, *args, **kwargs)
