"""Runs Unsloth's GPU code on a machine without a GPU.

On such a machine `import unsloth` picks its CPU backend, which is stock transformers + PEFT + TRL: none of Unsloth's
own trainers, savers, kernels or its compile cache are in it. `activate()` makes torch claim CUDA devices, so that
`import unsloth` takes its CUDA branch, while every tensor stays on the CPU. The kernels run in Triton's interpreter.

    import unsloth_multigpu as ump
    ump.enable_multi_gpu(num_gpus=2, device="cpu")    # if the script uses it: first, as always
    from tests.helpers.gpu_path import activate
    activate()                                        # before `import unsloth`
    from unsloth import FastLanguageModel
    model, tokenizer = FastLanguageModel.from_pretrained(path, device_map="cpu", load_in_4bit=False, ...)

The script says `device_map="cpu"`, `optim="adamw_torch"` (Unsloth's default is the 8-bit one of bitsandbytes) and
`dataset_num_proc=1`. Not covered: NCCL, placement on several devices, torch.compile, 4-bit weights, CUDA streams.
A kernel costs milliseconds per row here: use one layer, few heads, samples of about ten tokens.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable
from typing import Any

# A Turing card, such as a T4. On a card with bfloat16 Unsloth trains a LoRA of a float32 model under bfloat16 autocast,
# whatever the arguments say, and the rounding (3e-4 of a gradient norm) hides what tests measure.
_CAPABILITY = (7, 5)
_MEMORY_BYTES = 16 * 2**30
_NAME = "CPU pretending to be CUDA"

_ENVIRONMENT = {
    # Triton's kernels become Python functions over numpy arrays.
    "TRITON_INTERPRET": "1",
    # torch.compile would generate CUDA code.
    "UNSLOTH_COMPILE_DISABLE": "1",
    # GRPO would share a prompt's prefix by FlexAttention, which has no backward pass on the CPU.
    "UNSLOTH_GRPO_PREFIX_GROUPER": "0",
    # Else accelerate sees torch.cuda.is_available() and asks for NCCL and cuda:LOCAL_RANK.
    "ACCELERATE_USE_CPU": "true",
    # unsloth/_gpu_init.py looks for libcuda and, as root, runs ldconfig on the whole machine if there is none.
    # Where Triton is told a folder, it asks no further.
    "TRITON_LIBCUDA_PATH": "/nonexistent",
}


def activate(num_devices: int | None = None) -> None:
    """Makes torch claim CUDA devices and keeps every tensor on the CPU, until the process ends.

    Args:
        num_devices: Devices to claim. None = one for each rank of this machine (`LOCAL_WORLD_SIZE`), else one.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Before the spoof: bitsandbytes picks its library at import, and the CUDA one does not load here. From the CPU
    # library every missing function is a stub that raises when called, which is enough for Unsloth to bind them.
    import bitsandbytes  # noqa: F401

    _spoof_cuda(num_devices or int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    _spoof_triton_driver()
    _send_cuda_to_cpu()


def _spoof_cuda(num_devices: int) -> None:
    """What Unsloth, transformers and TRL ask torch.cuda. `is_initialized` stays False: nothing was initialised."""
    import torch

    current = [0]

    def rng_state(device: object = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    answers: dict[str, Any] = {
        # Which branch `import unsloth` takes (unsloth_zoo/device_type.py) and how many ranks accelerate may place.
        "is_available": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: current[0],
        "set_device": lambda device: current.__setitem__(0, _Device(device).idx),
        # Read at import to pick kernels, dtypes and compile options.
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_properties": lambda device=None: _properties(),
        "get_device_name": lambda device=None: _NAME,
        # Unsloth wraps it and looks for this parameter in its signature.
        "is_bf16_supported": lambda including_emulation=True: False,
        # Memory figures: printed in banners, and used to choose chunk sizes.
        "mem_get_info": lambda device=None: (_MEMORY_BYTES // 2, _MEMORY_BYTES),
        "memory_stats": lambda device=None: {},
        "memory_allocated": _answer(0),
        "memory_reserved": _answer(0),
        "max_memory_allocated": _answer(0),
        "max_memory_reserved": _answer(0),
        "reset_peak_memory_stats": _answer(None),
        "empty_cache": _answer(None),
        "ipc_collect": _answer(None),
        # Streams and events: gradient checkpointing with offload ("unsloth") and RoPE synchronise on them.
        "Stream": _Stream,
        "Event": _Event,
        "device": _Device,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        # Trainer saves and restores the states of the CUDA generators with a checkpoint.
        "get_rng_state": rng_state,
        "get_rng_state_all": lambda: [rng_state() for _ in range(num_devices)],
        "set_rng_state": _answer(None),
        "set_rng_state_all": _answer(None),
        "synchronize": _answer(None),
        "set_stream": _answer(None),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # Optimizers of torch 2.14 and newer ask the accelerator whether a graph is being captured.
    torch.accelerator.current_stream = lambda device=None: _Stream()  # type: ignore[assignment]
    # unsloth/kernels/utils.py collects the raw stream of each device at import; a CPU build of torch lacks the name.
    torch._C._cuda_getCurrentRawStream = _answer(0)  # type: ignore[attr-defined]


def _answer(value: object) -> Callable[..., object]:
    """A new function each time: torch._dynamo tells functions apart by their identity."""
    return lambda *args, **kwargs: value


def _properties() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=_NAME,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_MEMORY_BYTES,
        multi_processor_count=4,
        is_integrated=False,
        gcnArchName="",
        warp_size=32,
    )


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Device:
    """`torch.cuda.device`: Unsloth enters it around kernels when there are several devices, and reads `idx`."""

    def __init__(self, device: Any) -> None:
        self.idx: int = device if isinstance(device, int) else getattr(device, "index", None) or 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def _spoof_triton_driver() -> None:
    """Kernel modules ask Triton's driver for its target at import; finding none, Triton would try to compile one."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class Driver(DriverBase):
        utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"multiprocessor_count": 4, "max_shared_mem": 65536}
        )

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("Nothing is compiled here.")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("Nothing is tuned here.")

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", _CAPABILITY[0] * 10 + _CAPABILITY[1], 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return torch.cuda.current_device()

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(Driver())


def _send_cuda_to_cpu() -> None:
    """Every torch function that is told to use a CUDA device uses the CPU. The mode is per thread: the main one."""
    import torch
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Any) -> Any:
        is_cuda = (
            type(value) is int
            or (isinstance(value, torch.device) and value.type == "cuda")
            or (isinstance(value, str) and value.split(":")[0] == "cuda")
        )
        return "cpu" if is_cuda else value

    class CudaIsCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.device:
                # `torch.device(0)` asks for an accelerator and fails without one. The object stays a CUDA device,
                # because Unsloth indexes its lists by `.index`; whoever uses it comes through here again.
                return func("cuda", args[0]) if len(args) == 1 and type(args[0]) is int else func(*args, **kwargs)
            if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            kwargs.pop("pin_memory", None)
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            if func is torch.Tensor.to:
                args = (args[0], *(on_cpu(value) for value in args[1:2]), *args[2:])
            return func(*args, **kwargs)

    CudaIsCpu().__enter__()
