"""The program of a slot: runs one client after the other, each message by Flower's ClientApp."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.federated.task import CLIENT_RAISED
from unsloth_multigpu.federated.user_code import Outcome, unpack
from unsloth_multigpu.step.memory import is_out_of_memory
from unsloth_multigpu.wire.frames import Frames

# The server sends it to ask where in its code a client is.
STACK_SIGNAL = signal.SIGUSR2
# Frames of contextlib (Python's, torch's) lie between our own.
_OWN = ("/unsloth_multigpu/federated/", "/flwr/", "contextlib.py")


class DeviceError(RuntimeError):
    """The slot's device cannot be used."""


def serve(frames: Frames, app: ClientApp, kind: str) -> None:
    """Answers messages until the server is gone.

    Args:
        app: Keeps what it has loaded from one client to the next.
        kind: The device's.
    """
    while True:
        answer = run_client(app, kind, *pickle.loads(_receive(frames)))
        _flush()
        if kind != "cpu":
            # Otherwise what a client left (a Trainer is a reference cycle, torch caches freed memory) would be part of
            # the next one's peak. On a lost device it raises again; the answer reports that already.
            with Outcome():
                gc.collect()
                getattr(torch, kind).empty_cache()
        frames.send(answer)


def run_client(app: ClientApp, kind: str, message: Message, context: Context) -> bytes:
    """Runs one client on a device of this kind, and returns the answer, pickled."""
    _reset_peak(kind)
    outcome = Outcome()
    with outcome:
        reply = app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, expected flwr.app.Message")
        return pickle.dumps(("done", reply, context.state, _peak(kind), "", "", False), pickle.HIGHEST_PROTOCOL)
    assert outcome.error is not None
    return _failure(outcome.error, str(outcome), message, kind)


def _failure(error: BaseException, text: str, message: Message, kind: str) -> bytes:
    users = _users_part(error.__traceback__)
    lines = traceback.format_exception(type(error), error, users or error.__traceback__)
    if users is None and isinstance(error, MultiGPUError):
        lines = [f"{type(error).__name__}: {error}"]  # The message is enough: the frames are only ours and Flower's.
    error.__traceback__ = users = None  # Their frames hold the client's tensors.
    peak_bytes = _peak(kind)
    outcome = Outcome()
    with outcome:
        check_device(kind)
    if outcome.error is not None:
        # After such an error every later client of this process would fail.
        return pickle.dumps(("lost", f"its device failed: {text}"))
    reply = Message(Error(code=CLIENT_RAISED, reason=text), reply_to=message)
    # Without the client's state: what it changed before the error is dropped with the rest of its work.
    return pickle.dumps(("done", reply, None, peak_bytes, text, "".join(lines), is_out_of_memory(error)))


def check_device(kind: str) -> None:
    """Computes something on the slot's device.

    Raises:
        DeviceError: There is none, or more than one.
        RuntimeError: It does not work.
    """
    if kind == "cpu":
        return
    num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if num_devices != 1:
        raise DeviceError(f"this slot sees {num_devices} {kind} devices; expected 1")
    value = torch.ones(8, device=kind).sum().item()
    if value != 8:
        raise DeviceError(f"the sum of 8 ones is {value} on it")


def _peak(kind: str) -> int:
    """Bytes: torch's on an accelerator, this process's on the CPU; since `_reset_peak`."""
    if kind == "cpu":
        try:
            status = Path("/proc/self/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024
        except (OSError, IndexError):  # This kernel does not report it.
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(getattr(torch, kind).max_memory_reserved())


def _reset_peak(kind: str) -> None:
    if kind != "cpu":
        getattr(torch, kind).reset_peak_memory_stats()
        return
    with suppress(OSError):  # Not permitted everywhere. The peak is then the one of all clients so far.
        Path("/proc/self/clear_refs").write_text("5")


def _free_bytes(kind: str) -> int:
    if kind != "cpu":
        return int(getattr(torch, kind).mem_get_info()[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and any(own in tb.tb_frame.f_code.co_filename for own in _OWN):
        tb = tb.tb_next
    return tb


def _receive(frames: Frames) -> bytearray:
    while (messages := frames.receive()) is not None:
        if messages:
            return messages[0]
    return end_process_group()


def _end_with_server(descriptor: int) -> None:
    """Ends the slot when the server has ended, also in the middle of a client."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    end_process_group()


def end_process_group() -> NoReturn:
    """Kills this process and what clients have started in it: a DataLoader's workers, programs."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _start(frames: Frames, kind: str, app: bytes) -> ClientApp:
    """Loads the app; a process that cannot says why, and ends."""
    outcome, is_device = Outcome(), True
    with outcome:
        check_device(kind)
        is_device = False
        loaded: ClientApp = unpack(app)
        frames.send(pickle.dumps(("ready", _free_bytes(kind))))
        return loaded
    assert outcome.error is not None
    traceback.print_exception(outcome.error)
    frames.send(pickle.dumps(("unusable" if is_device else "unloadable", str(outcome))))
    _flush()
    os._exit(1)


def main() -> None:
    """Runs this process as a slot: `sys.argv[1]` is its end of the pair."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    frames = Frames(socket.socket(fileno=descriptor))
    # Workers of a DataLoader would otherwise keep the socket open, and could write to it.
    os.register_at_fork(after_in_child=frames.close)
    threading.Thread(target=_end_with_server, args=(descriptor,), name="unsloth_multigpu-server", daemon=True).start()
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)
    for stream in (sys.stdout, sys.stderr):
        # The server reads the log as UTF-8, whatever the locale here.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    kind, arguments, app = pickle.loads(_receive(frames))
    sys.argv[:] = arguments
    serve(frames, _start(frames, kind, app), kind)
