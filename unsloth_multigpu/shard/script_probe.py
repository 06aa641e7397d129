"""Forecasts the memory of a script's training, in a child process that loads no weights and ends at `train()`.

The child runs the user's own command. An environment variable tells it to use `Probe`, the tool below. Then
`enable_multi_gpu()` starts no ranks, models are created on the meta device, and `Trainer.train` counts the first step,
writes the forecasts and ends the process.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import functools
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from unsloth_multigpu.errors import MultiGPUError, RankTimeoutError, SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import Part, TrainerLike
from unsloth_multigpu.patching import Patch, PatchRegistry
from unsloth_multigpu.shard.memory import WITHOUT_FORECAST, MemoryForecast, Mode, Training, decide, fits
from unsloth_multigpu.tool import Tool
from unsloth_multigpu.versions import installed_version
from unsloth_multigpu.wire.child import exit_on_signal, run_to_end
from unsloth_multigpu.wire.context import ToolRequest
from unsloth_multigpu.wire.run import private_dir
from unsloth_multigpu.words import how_ended, shown_lines

logger = get_logger(__name__)

DEFAULT_LIMIT_S = 600.0
_LOG_LINES = 15
_TRANSFORMERS = "transformers>=4.57,<6"
# Arguments of from_pretrained that are not attributes of the configuration.
_WEIGHT_ARGUMENTS = ("dtype", "torch_dtype", "quantization_config")
# Arguments of `_from_config` that the model's `__init__` does not have.
_MODEL_ARGUMENTS = ("attn_implementation", "experts_implementation")


@dataclass(frozen=True)
class Question:
    """The forecasts that are requested.

    Args:
        cases: Modes and numbers of ranks. Sharded ones are left out if the model cannot be sharded.
        tokens: Tokens of the longest sample; None = as in the data set.
        device_bytes: Memory of a device; None = that of the smallest device of this machine.
        is_choice: Stop at the first case that fits. Without devices, the ranks share the machine's memory equally.
    """

    cases: Sequence[tuple[Mode, int]]
    tokens: int | None = None
    device_bytes: int | None = None
    is_choice: bool = False


@dataclass(frozen=True)
class Answer:
    """The forecasts of a script.

    Args:
        forecasts: One for each case.
        devices: Total memory of each device of this machine, in bytes.
        device_bytes: Memory of a device with which forecasts are compared; None = not known.
    """

    training: Training
    forecasts: Sequence[MemoryForecast]
    devices: Sequence[int] = ()
    device_bytes: int | None = None


def ask(
    command: Sequence[str], environment: Mapping[str, str], question: Question, *, limit_s: float = DEFAULT_LIMIT_S
) -> Answer:
    """Runs a script up to its first `train()` and returns its forecasts. Its output is not shown.

    `environment` has all environment variables of the script.

    Raises:
        SetupError: The script does not reach `train()`, or its step cannot be counted.
        RankTimeoutError: It took longer than `limit_s`.
    """
    with exit_on_signal(), private_dir() as folder:
        outcome, log = folder / "forecast.json", folder / "forecast.log"
        values = {"file": str(outcome), "question": dataclasses.asdict(question)}
        request = ToolRequest("probe", values)
        variables = {**environment, **request.variables(), "WANDB_MODE": "disabled"}
        code = run_to_end(command, variables, log, marker=str(folder), limit_s=limit_s)
        if code is None:
            raise RankTimeoutError(
                f"The script did not reach train() within {limit_s:g} seconds.",
                hint=f"`unsloth-multigpu plan --timeout-s` sets a longer limit. {WITHOUT_FORECAST}",
            )
        if code or not outcome.exists():
            raise _no_answer(code, log)
        values = json.loads(outcome.read_text(encoding="utf-8"))
    if "error" in values:
        raise SetupError(values["error"], hint=values["hint"])
    forecasts = [MemoryForecast(**row) for row in values["forecasts"]]
    return Answer(Training(**values["training"]), forecasts, values["devices"], values["device_bytes"])


def _no_answer(code: int, log: Path) -> SetupError:
    """Returns the error for a script that has ended before `train()`, with the last lines of its output."""
    lines = shown_lines(log.read_text(encoding="utf-8", errors="replace"))[-_LOG_LINES:]
    shown = "".join(f"\n  | {line}" for line in lines)
    hint = (
        "A forecast loads no weights, so the script must not read them before train(). enable_multi_gpu() must come "
        "before transformers is imported."
    )
    if code == -signal.SIGKILL:
        hint = "A model that the script builds without from_pretrained has its weights in this machine's memory."
    return SetupError(
        f"The script {how_ended(code)} before train() of a transformers Trainer; its memory cannot be forecast.{shown}",
        hint=f"{hint} {WITHOUT_FORECAST}",
    )


def choose_shard(command: Sequence[str], environment: Mapping[str, str], config: MultiGPUConfig, num_ranks: int) -> str:
    """Decides shard="auto" by a forecast of the script: DDP if it fits the devices, else sharding over `num_ranks`.

    Returns:
        The value of `shard`: "on" or "off".

    Raises:
        SetupError: Neither fits, the memory of the step cannot be counted, or the run has several nodes.
        RankTimeoutError: The script does not reach `train()` in time.
    """
    if config.nnodes != 1:
        raise SetupError(
            "shard='auto' works on one node only, and this run has several nodes.",
            hint="Set shard='on' or shard='off'.",
        )
    logger.info("shard=auto: running the script up to train(), without weights, to count the memory of its first step")
    modes: tuple[Mode, ...] = ("ddp", "sharded") if num_ranks > 1 else ("ddp",)
    cases = tuple((mode, num_ranks) for mode in modes)
    answer = ask(command, environment, Question(cases, is_choice=True))
    assert answer.device_bytes is not None
    mode, text = decide(answer.training, answer.forecasts, answer.device_bytes)
    logger.info("shard=auto: %s", text)
    return "on" if mode == "sharded" else "off"


class Probe(Tool):
    """Writes the forecasts of the first training to a JSON file, and ends the process."""

    # Nothing of the run is saved.
    is_comparison = True

    def __init__(self, file: str, question: Mapping[str, Any]) -> None:
        self._file = Path(file)
        self._question = Question(**question)
        # The script's options.
        self._config: MultiGPUConfig | None = None

    def adjusted(self, config: Any) -> Any:
        if self._config is None:
            PatchRegistry(meta_patches()).apply()
        self._config = config
        # There is one process. Only these options have an effect before train().
        kept = {name: getattr(config, name) for name in ("device", "global_batch", "batch_size_per_gpu")}
        return MultiGPUConfig(num_gpus=1, **kept)

    def part(self, trainer: TrainerLike, session: Any, steps: Any) -> Part | None:
        values: dict[str, Any]
        try:
            values = dataclasses.asdict(self._answered(trainer))
        except MultiGPUError as error:
            values = {"error": str(error.args[0]), "hint": error.hint}
        self._file.write_text(json.dumps(values), encoding="utf-8")
        leave_process()

    def _answered(self, trainer: TrainerLike) -> Answer:
        from unsloth_multigpu.shard.count import describe, forecasts

        asked, devices = self._question, _devices()
        host_share = psutil.virtual_memory().total // asked.cases[0][1] if asked.is_choice else None
        device_bytes = asked.device_bytes or min(devices, default=host_share)
        training = describe(trainer, self._config, asked.tokens)
        cases = [case for case in asked.cases if case[0] == "ddp" or not training.only_whole[0]]
        found = []
        for forecast in forecasts(trainer, training, cases):
            found.append(forecast)
            if asked.is_choice and device_bytes is not None and fits(forecast, device_bytes):
                break
        return Answer(training, found, devices, device_bytes)


def _devices() -> tuple[int, ...]:
    """Returns the total memory, in bytes, of each device that torch sees in this process. The CPU is not among them."""
    import torch

    from unsloth_multigpu.group.manager import find_accelerator

    found = find_accelerator()
    module: Any = None if found is None else torch.get_device_module(found)
    return () if module is None else tuple(module.mem_get_info(index)[1] for index in range(module.device_count()))


def leave_process() -> NoReturn:
    """Runs exit handlers, and ends the process with code 0, not by SystemExit, which the script might catch."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def meta_patches() -> list[Patch]:
    """Returns patches of functions that would read, write or move weights, or check this process's devices."""
    modeling = "transformers.modeling_utils:PreTrainedModel"
    optional = functools.partial(Patch, optional=True)
    return [
        Patch(f"{modeling}.from_pretrained", _TRANSFORMERS, _from_configuration),
        Patch(f"{modeling}.cuda", _TRANSFORMERS, _cast_only),
        Patch(f"{modeling}.to", _TRANSFORMERS, _cast_only),
        optional("peft.peft_model:PeftModel.to", "peft>=0.18", _cast_only),
        # Both read an embedding, which has no values here: to initialize new rows, and to find untrained ones.
        optional(f"{modeling}._init_added_embeddings_weights_with_mean", _TRANSFORMERS, lambda *_, **__: None),
        optional("unsloth_zoo.tokenizer_utils:fix_untrained_tokens", "unsloth_zoo>=2026.10.7", lambda *_, **__: None),
        # The devices for which the memory is forecast may be others than this process has.
        optional("transformers.training_args:is_torch_bf16_gpu_available", _TRANSFORMERS, lambda *_, **__: True),
        optional("bitsandbytes.nn.modules:fix_4bit_weight_quant_state_from_module", "bitsandbytes>=0.46", _pass_state),
        optional("triton.runtime.jit:JITFunction.run", "triton>=3", _skip_without_values),
        optional("triton.runtime.autotuner:Autotuner.run", "triton>=3", _skip_without_values),
    ]


def _from_configuration(original: Callable[..., Any], /, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `from_pretrained`: creates the model from its configuration, on the meta device."""
    name = args[0] if args else kwargs.pop("pretrained_model_name_or_path")
    if kwargs.get("gguf_file"):
        raise SetupError(f"{name}: the memory of a GGUF file cannot be forecast.", hint=WITHOUT_FORECAST)
    wants_info = kwargs.pop("output_loading_info", False)
    config, kwargs = _configuration(cls, name, kwargs)
    config.name_or_path = str(name)
    quantizer = _quantizer(config, kwargs.pop("quantization_config", None), kwargs)
    dtype = _dtype(config, kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None), quantizer)
    # The other arguments are about files and devices, of which a model on the meta device has none.
    taken = {*_MODEL_ARGUMENTS, *inspect.signature(cls.__init__).parameters}
    kwargs = {name: value for name, value in kwargs.items() if name in taken}
    model = make_model(cls, config, dtype, quantizer, **kwargs)
    return (model, {}) if wants_info else model


def make_model(cls: Any, config: Any, dtype: Any, quantizer: Any, **kwargs: Any) -> Any:
    """Creates a model on the meta device, with quantized layers if transformers' `HfQuantizer` is given."""
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
    """Returns the model's configuration, and the arguments that do not belong to it."""
    given = kwargs.pop("config", None)
    if hasattr(given, "to_dict"):
        config = copy.deepcopy(given)
        if "attn_implementation" in kwargs:
            config._attn_implementation = kwargs.pop("attn_implementation")
        return config, kwargs
    others = {key: value for key, value in kwargs.items() if key not in _WEIGHT_ARGUMENTS}
    config, unused = cls.config_class.from_pretrained(given or name, return_unused_kwargs=True, **others)
    return config, {**unused, **{key: kwargs[key] for key in _WEIGHT_ARGUMENTS if key in kwargs}}


def _quantizer(config: Any, asked: Any, kwargs: dict[str, Any]) -> Any:
    """Returns the `HfQuantizer` that transformers would use; None without quantization."""
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


def _cast_only(original: Callable[..., Any], /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Casts to the given dtype and ignores devices: tensors without values cannot be moved."""
    import torch

    if not any(p.is_meta for p in self.parameters()):
        return original(self, *args, **kwargs)
    dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    return original(self, dtypes[0]) if dtypes else self


def _pass_state(original: Callable[..., Any], /, module: Any) -> None:
    """Passes the layer's `quant_state` to its weight: a fake weight is not of bitsandbytes' parameter class."""
    if getattr(module.weight, "quant_state", None) is None:
        module.weight.quant_state = module.quant_state


def _skip_without_values(original: Callable[..., Any], /, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Skips a Triton kernel if an argument is a fake tensor, which has no memory to read or write."""
    from unsloth_multigpu.shard.fake import has_no_values

    return None if has_no_values(args, kwargs) else original(self, *args, **kwargs)
