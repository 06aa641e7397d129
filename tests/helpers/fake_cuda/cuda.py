"""Gives this process the devices of device.cpp, when it imports torch.

`install()` comes before `import torch`. Nothing is patched in a torch that is there already: the library is loaded
before torch asks for a device, and the names that a CPU build of `torch._C` lacks are added before `torch.cuda` and
`torch.distributed` are imported, so that both are torch's own code.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import importlib.util
import json
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAME = "CUDA device in host memory"
_HERE = os.path.dirname(os.path.abspath(__file__))
# The order of `Wait` in device.cpp.
_KINDS = ("item", "to host", "to device", "data-dependent", "synchronize")
_ENVIRONMENT = {
    # torch's own Triton kernels, for a few operators.
    "TORCH_DISABLE_NATIVE_JIT": "1",
    # Triton's kernels become Python functions over numpy arrays, and nothing looks for libcuda.
    "TRITON_INTERPRET": "1",
    "TRITON_LIBCUDA_PATH": "/nonexistent",
    # torch.compile would generate CUDA code.
    "UNSLOTH_COMPILE_DISABLE": "1",
    # GRPO would share a prompt's prefix by FlexAttention, which has no backward pass on the CPU.
    "UNSLOTH_GRPO_PREFIX_GROUPER": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
_ALLOCATED, _PEAK, _LIMIT, _NUM_ALLOCATIONS, _NUM_FAILURES = range(5)


def install() -> None:
    """Arranges that `import torch` finds the devices, as the variables of `fake_cuda.cards` say."""
    assert "torch" not in sys.modules, "the devices have to be there before torch is imported"
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Runs what stands in `_AROUND` in place of the code of a module, which it calls."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _AROUND:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_AROUND[name], spec.loader.exec_module)
        return spec


def _torch(run: Any, module: Any) -> None:
    root = os.path.dirname(module.__spec__.origin)
    for path in (*sorted(Path(root, "lib").glob("libgomp*")), f"{root}/lib/libc10.so", f"{root}/lib/libtorch_cpu.so"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    _library()
    run(module)
    import torch

    torch.version.cuda = "12.8"
    torch.cuda.nccl.version = lambda: (2, 30, 3)
    _teach(torch.UntypedStorage)
    atexit.register(_let_backward_end)
    if os.environ.get("FAKE_CUDA_REPORT"):
        _report_at_exit(os.environ["FAKE_CUDA_REPORT"])


def _torch_cuda(run: Any, module: Any) -> None:
    import torch._C

    for name, value in _missing_names(module).items():
        setattr(torch._C, name, value if isinstance(value, (bool, type)) else _function(value))
    run(module)
    module._cudart = types.SimpleNamespace(
        cudaMemGetInfo=lambda device: (_free(device), _library().fake_cuda_memory(device, _LIMIT)),
        cudaError=types.SimpleNamespace(success=0),
        cudaGetErrorString=lambda code: f"error {code}",
    )
    module.get_device_properties = functools.wraps(module.get_device_properties)(
        lambda device=None: _properties(module._utils._get_device_index(device, optional=True))
    )


def _function(call: Any) -> Any:
    """A function of its own: torch._dynamo keeps a table of all by their identity."""
    return lambda *args, **kwargs: call(*args, **kwargs)


def _c10d(run: Any, module: Any) -> None:
    import torch._C._distributed_c10d as functions

    if hasattr(functions, "ProcessGroupGloo"):
        functions.ProcessGroupNCCL = _process_group_nccl(functions)
    run(module)


def _bitsandbytes(run: Any, module: Any) -> None:
    """With the library of CUDA kernels it would not start. Without it, its operators come to the CPU's kernels."""
    import torch

    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        run(module)
    finally:
        torch.cuda.is_available = is_available
    functional = module.functional
    # Unsloth calls the library itself, by pointers, and loads in 16 bits where it has no kernels.
    functional.get_ptr = lambda tensor: tensor
    vars(functional.lib).update(
        cdequantize_blockwise_fp32=_Kernel(_dequantize_blockwise),
        **{f"cdequantize_blockwise_{name}_nf4": _Kernel(_dequantize_nf4) for name in ("fp32", "fp16", "bf16")},
        **{f"cgemm_4bit_inference_naive_{name}": _Kernel(_no_kernel) for name in ("fp16", "bf16")},
    )


class _Kernel:
    """A function of bitsandbytes' library that is given tensors in the place of pointers."""

    restype = None  # By this Unsloth knows that the library was loaded.

    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute = compute

    def __call__(self, *arguments: Any) -> None:
        self._compute(*(getattr(value, "value", value) for value in arguments))


def _dequantize_blockwise(code: Any, packed: Any, absmax: Any, out: Any, blocksize: int, *_: Any) -> None:
    import torch

    out.copy_(torch.ops.bitsandbytes.dequantize_blockwise(packed, absmax, code, blocksize, out.dtype))


def _dequantize_nf4(_: Any, packed: Any, absmax: Any, out: Any, blocksize: int, *__: Any) -> None:
    import torch

    out.copy_(torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, blocksize, "nf4", out.shape, out.dtype))


def _no_kernel(*_: Any) -> None:
    raise NotImplementedError("The device in host memory does not multiply by 4-bit weights.")


def _triton(run: Any, module: Any) -> None:
    """Kernels ask Triton's driver for its target when they are defined; finding none, Triton would compile one."""
    run(module)
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def target() -> Any:
        major, minor = torch.cuda.get_device_capability()
        return GPUTarget("cuda", major * 10 + minor, 32)

    properties = {"multiprocessor_count": 4, "max_shared_mem": 65536}
    driver.set_active(
        types.SimpleNamespace(
            utils=types.SimpleNamespace(get_device_properties=lambda device: properties),
            get_current_target=target,
            get_active_torch_device=lambda: torch.device("cuda", torch.cuda.current_device()),
            get_current_device=lambda: torch.cuda.current_device(),
            get_current_stream=lambda device: 0,
        )
    )


_AROUND = {
    "torch": _torch,
    "torch.cuda": _torch_cuda,
    "torch.distributed.distributed_c10d": _c10d,
    "bitsandbytes": _bitsandbytes,
    "triton": _triton,
}


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(os.path.join(os.environ["FAKE_CUDA"], "libfake_cuda.so"), mode=ctypes.RTLD_GLOBAL)
    for name in ("fake_cuda_memory", "fake_cuda_stream"):
        getattr(library, name).restype = ctypes.c_int64
    library.fake_cuda_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    return library


@functools.cache
def _nccl() -> Any:
    spec = importlib.util.spec_from_file_location("fake_nccl", os.path.join(os.environ["FAKE_CUDA"], "fake_nccl.so"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _free(device: int) -> int:
    return int(_library().fake_cuda_memory(device, _LIMIT) - _library().fake_cuda_memory(device, _ALLOCATED))


def _missing_names(cuda: Any) -> dict[str, Any]:
    """What `torch._C` has in a build for CUDA and torch.cuda, accelerate or Unsloth call."""
    import torch

    library = _library()
    count = library.fake_cuda_device_count()
    opened_by: list[int] = []

    def init() -> None:
        if not count:
            raise RuntimeError("No CUDA GPUs are available")
        opened_by.append(os.getpid())
        cuda.default_generators = tuple(map(_nccl().default_generator, range(count)))

    def set_device(device: int) -> None:
        if not 0 <= device < count:
            error = getattr(torch, "AcceleratorError", RuntimeError)
            raise error(f"CUDA error: invalid device ordinal\n{device} of {count}")
        library.fake_cuda_set_device(device)

    def exchange_device(device: int) -> int:
        before = int(library.fake_cuda_device())
        if device >= 0:
            set_device(device)
        return before

    def stream_of(device: int) -> tuple[int, int, int]:
        return library.fake_cuda_stream(device), device, 1

    def refuse(*args: object, **kwargs: object) -> Any:
        raise NotImplementedError("The CUDA device in host memory does not have this.")

    return {
        "_has_cuda": True,
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: bool(opened_by) and os.getpid() not in opened_by,
        "_cuda_getDevice": library.fake_cuda_device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_synchronize": lambda: library.fake_cuda_synchronize(library.fake_cuda_device()),
        "_cuda_getArchFlags": lambda: "sm_75 sm_80 sm_90",
        "_cuda_getCurrentStream": stream_of,
        "_cuda_getDefaultStream": lambda device: (0, device, 1),
        "_cuda_getCurrentRawStream": library.fake_cuda_stream,
        "_cuda_setStream": lambda stream_id, device_index, device_type: library.fake_cuda_set_stream(
            device_index, stream_id
        ),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_emptyCache": lambda *args: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_memoryStats": _memory_stats,
        "_cuda_resetPeakMemoryStats": library.fake_cuda_reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_memorySnapshot": lambda *args: {"segments": [], "device_traces": []},
        "_cuda_set_sync_debug_mode": _set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": lambda: _sync_debug_mode,
        "_cuda_sleep": lambda cycles: None,
        "_CudaDeviceProperties": types.SimpleNamespace,
        "_CudaStreamBase": _stream_base(torch._C.Stream),
        "_CudaEventBase": _event_base(torch._C.Event),
        "_CUDAGraph": type("_CUDAGraph", (), {"__new__": refuse}),
        "_graph_pool_handle": refuse,
    }


def _stream_base(stream: Any) -> Any:
    class CudaStreamBase(stream):  # type: ignore[misc]
        def __new__(cls, priority: int = 0, stream_ptr: int = 0, **identity: int) -> Any:
            if identity:
                return stream.__new__(cls, **identity)
            return stream.__new__(cls, device=f"cuda:{_library().fake_cuda_device()}", priority=priority)

        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

    return CudaStreamBase


def _event_base(event: Any) -> Any:
    class CudaEventBase(event):  # type: ignore[misc]
        def __new__(cls, enable_timing: bool = False, **options: bool) -> Any:
            made = event.__new__(cls, device="cuda", enable_timing=enable_timing)
            # `torch.Event` does not measure against an event of a derived class.
            made.timed = event(device="cuda", enable_timing=enable_timing)
            return made

        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def record(self, stream: Any = None) -> None:
            super().record(stream)
            self.timed.record(stream)

        def elapsed_time(self, end: Any) -> float:
            return float(self.timed.elapsed_time(getattr(end, "timed", end)))

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

    return CudaEventBase


@functools.cache
def _properties(device: int) -> Any:
    major, minor = map(int, os.environ.get("FAKE_CUDA_CAPABILITY", "7.5").split("."))
    return types.SimpleNamespace(
        name=_NAME,
        major=major,
        minor=minor,
        total_memory=_library().fake_cuda_memory(device, _LIMIT),
        multi_processor_count=4,
        is_integrated=False,
        gcnArchName="",
        warp_size=32,
        uuid=f"GPU-{_library().fake_cuda_physical_index(device):08x}",
        shared_memory_per_block_optin=65536,
        shared_memory_per_multiprocessor=65536,
        max_threads_per_multi_processor=1024,
    )


def _memory_stats(device: int) -> dict[str, Any]:
    read = functools.partial(_library().fake_cuda_memory, device)
    size = {"current": read(_ALLOCATED), "peak": read(_PEAK), "allocated": 0, "freed": 0}
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    return {
        **{name: {"all": dict(size)} for name in names},
        "allocation": {"all": {"current": 0, "peak": 0, "allocated": read(_NUM_ALLOCATIONS), "freed": 0}},
        "num_ooms": read(_NUM_FAILURES),
    }


def _teach(storage: Any) -> None:
    """torch's own storage knows the CPU and what torch was built for."""
    import torch

    make, resize = storage.__new__, storage.resize_

    def on_device(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, device=device, **kwargs)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, num_bytes: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, num_bytes)
        _nccl().resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), num_bytes)
        return self

    storage.__new__, storage.resize_ = on_device, resize_


def _process_group_nccl(functions: Any) -> Any:
    """The class that torch asks for by this name: a ProcessGroupNccl of nccl.cpp over a new group of gloo."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout: Any = None

    class IsNccl(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, _nccl().ProcessGroupNccl)

    def make(cls: Any, store: Any, rank: int, size: int, options: Any) -> Any:
        return _nccl().ProcessGroupNccl(
            functions.ProcessGroupGloo(store, rank, size, timeout=options._timeout), options._timeout
        )

    kind = IsNccl("ProcessGroupNCCL", (), {"__new__": make, "Options": Options})
    nccl = _nccl().ProcessGroupNccl
    nccl._group_start = nccl._group_end = lambda self: None
    nccl.uid, nccl.options = -1, Options()
    return kind


# ---- what the host waited for


waits: collections.Counter[tuple[str, str]] = collections.Counter()


def trace_waits() -> None:
    """Counts in `waits` from now on how often the host waits for the device, by kind and by "file:line function"."""
    global _hook
    _hook = ctypes.CFUNCTYPE(None, ctypes.c_int)(_count_wait)
    _library().fake_cuda_on_wait(_hook)


_hook: Any = None
_sync_debug_mode = 0


def _set_sync_debug_mode(mode: int) -> None:
    global _sync_debug_mode
    _sync_debug_mode = mode
    trace_waits()


def _count_wait(kind: int) -> None:
    if _sync_debug_mode and _KINDS[kind] != "synchronize":
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    frame: Any = sys._getframe(1)
    while frame is not None and _is_of_torch(frame.f_code.co_filename):
        frame = frame.f_back
    place = "?"
    if frame is not None:
        place = f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"
    waits[_KINDS[kind], place] += 1


@functools.cache
def _is_of_torch(file: str) -> bool:
    return "/site-packages/torch/" in file or file.startswith((_HERE, "<"))


def _let_backward_end() -> None:
    """Waits for threads of the last backward pass: one that is late aborts the process (pytorch/pytorch#190489)."""
    time.sleep(0.006)  # Longer than a thread waits before it asks for the GIL.
    stats = [path for path in Path("/proc/self/task").glob("*/stat") if "(pt_autograd" in path.read_text()]
    while any(") R" in path.read_text() for path in stats):
        time.sleep(0.001)


def _report_at_exit(path: str) -> None:
    """Writes what this process did with the devices into `path`.PID: which it opened, peaks of memory, waits."""
    trace_waits()

    def write() -> None:
        library = _library()
        devices = range(library.fake_cuda_device_count())
        report = {
            "rank": os.environ.get("RANK", ""),
            "opened": [library.fake_cuda_physical_index(d) for d in devices if library.fake_cuda_is_opened(d)],
            "peak_bytes": [library.fake_cuda_memory(d, _PEAK) for d in devices],
            "waits": [[kind, place, count] for (kind, place), count in waits.most_common()],
        }
        Path(f"{path}.{os.getpid()}").write_text(json.dumps(report))

    atexit.register(write)
