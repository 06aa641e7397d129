"""The program of a slot's process: runs clients one after the other with Flower's ClientApp."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.wire.child import connect_to_parent

# What a client's functions may raise. sys.exit() ends the client and not the slot; Ctrl-C ends the slot.
_CLIENT_ERRORS = (Exception, SystemExit)


def main() -> None:
    """Runs this process as a slot until the server ends."""
    server = connect_to_parent()
    threading.Thread(target=_end_with_server, args=(int(sys.argv[2]),), daemon=True).start()
    # Otherwise DataLoader workers would keep the socket open, and could write to it.
    os.register_at_fork(after_in_child=server.close)
    device_type, sys.argv[:], pickled = _receive(server)
    app = _load(server, device_type, pickled)
    while True:
        _send(server, *run_client(app, device_type, *_receive(server)))


def run_client(app: ClientApp, device_type: str, message: Message, context: Context) -> tuple[Any, ...]:
    """Runs one client on the slot's device.

    Returns ("done", reply, peak of reserved bytes), ("failed", error in one line, traceback), or ("unusable", error) if
    the device does not work any more.
    """
    backend = None if device_type == "cpu" else getattr(torch, device_type)
    try:
        if backend is not None:
            # Frees memory of the previous client: a Trainer is a reference cycle, and torch caches freed memory.
            gc.collect()
            backend.empty_cache()
            backend.reset_peak_memory_stats()
        reply = app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, expected flwr.app.Message")
        return "done", reply, 0 if backend is None else int(backend.max_memory_reserved())
    except _CLIENT_ERRORS as error:
        line, lines = _in_one_line(error), traceback.format_exc()
        error.__traceback__ = None  # Its frames refer to the client's tensors.
    try:
        check_device(device_type)
    except _CLIENT_ERRORS:
        # Every later client of this process would fail, too.
        return "unusable", f"its device failed: {line}"
    return "failed", line, lines


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def check_device(device_type: str) -> None:
    """Computes on the slot's device. Raises SetupError unless one is visible, or torch's error if it does not work."""
    if device_type == "cpu":
        return
    num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if num_devices != 1:
        raise SetupError(f"this slot sees {num_devices} {device_type} devices; expected 1", hint="Check the driver.")
    torch.ones(8, device=device_type).sum().item()


def _load(server: Connection, device_type: str, pickled: bytes) -> ClientApp:
    """Checks the device and unpickles the app. If that fails, sends the error to the server and exits."""
    import cloudpickle  # type: ignore[import-untyped]

    failure = "unusable"
    try:
        check_device(device_type)
        failure = "unloadable"
        app: ClientApp = cloudpickle.loads(pickled)
        _send(server, "ready")
        return app
    except _CLIENT_ERRORS as error:
        traceback.print_exc()
        _send(server, failure, _in_one_line(error))
        os._exit(1)


def _send(server: Connection, *fields: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    server.send_bytes(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))


def _receive(server: Connection) -> Any:
    try:
        return pickle.loads(server.recv_bytes())
    except (EOFError, OSError):
        return _end_process_group()


def _end_with_server(pid: int) -> None:
    """Waits until the server ends, also while a client runs, and then ends the slot."""
    with suppress(ProcessLookupError):  # Raised if the server has ended already.
        wait([os.pidfd_open(pid)])
    _end_process_group()


def _end_process_group() -> NoReturn:
    """Kills this process and its children, such as DataLoader workers."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
