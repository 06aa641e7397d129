"""A test that leaves something behind fails itself, instead of the test after it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

GRACE_S = 10.0  # What is ending by itself may take this long.

# What importing unsloth, torch, the Hugging Face libraries, bitsandbytes and Flower sets once for the process.
SET_BY_LIBRARIES = (
    "GRPC_",
    "BITSANDBYTES_",
    "BNB_",
    "CUDA_MODULE_LOADING",
    "DIFFUSERS_",
    "HF_",
    "KMP_",
    "PROTOCOL_BUFFERS_",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_",
    "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_",
    "TORCH_ROCM_",
    "TRANSFORMERS_OFFLINE",
    "TRITON_",
    "UNSLOTH_",
    "USE_FLAX",
    "USE_TF",
)
OURS = "UNSLOTH_MULTIGPU_"
# Servants of the standard library, which live as long as the process that first needed them.
SERVANTS = ("resource_tracker", "forkserver")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A suite that a shell script runs in the background inherits an ignored Ctrl-C. Tests press it, and so do
        # programs that they start.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fail_on_leaks() -> Iterator[None]:
    environ, threads, children = dict(os.environ), set(threading.enumerate()), child_processes()
    yield
    leaks = [restore_environ(environ), wait_for_threads(threads), end_processes(children), end_process_group()]
    if found := "; ".join(filter(None, leaks)):
        pytest.fail(f"leaked {found}", pytrace=False)


def restore_environ(before: dict[str, str]) -> str:
    after = dict(os.environ)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    changed = sorted(name for name in changed if name.startswith(OURS) or not name.startswith(SET_BY_LIBRARIES))
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    return f"a variable: {', '.join(changed)}" if changed else ""


def wait_for_threads(before: set[threading.Thread]) -> str:
    end = time.monotonic() + GRACE_S
    started = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in started:
        thread.join(max(0.0, end - time.monotonic()))
    alive = [thread.name for thread in started if thread.is_alive()]
    return f"a thread: {', '.join(alive)}" if alive else ""


def end_processes(before: set[psutil.Process]) -> str:
    started = [child for child in child_processes() - before if not is_servant(child)]
    _, alive = psutil.wait_procs(started, timeout=GRACE_S)
    names = [f"{child.pid} {child.name()}" for child in alive]
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return f"a process: {', '.join(names)}" if names else ""


def child_processes() -> set[psutil.Process]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # Searching all processes of the machine takes longer than most tests.
    return set(psutil.Process().children(recursive=True))


def is_servant(process: psutil.Process) -> bool:
    try:
        return any(servant in argument for argument in process.cmdline() for servant in SERVANTS)
    except psutil.Error:
        return False  # Gone, or a zombie: waiting for it settles it.


def end_process_group() -> str:
    dist = sys.modules.get("torch.distributed")  # A test without torch must not pay for importing it.
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return ""
    dist.destroy_process_group()
    return "a process group: torch.distributed is still initialised"
