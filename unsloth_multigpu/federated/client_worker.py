"""The program of a slot's process: runs one client after the other by Flower's ClientApp."""

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

# Errors of a client's functions. sys.exit() ends the client, not the slot; Ctrl-C ends the slot.
_OF_CLIENT = (Exception, SystemExit)


def main() -> None:
    """Runs this process as a slot until the server is gone."""
    server = connect_to_parent()
    threading.Thread(target=_end_with_server, args=(int(sys.argv[2]),), daemon=True).start()
    # Otherwise DataLoader workers would keep the socket open, and could write to it.
    os.register_at_fork(after_in_child=server.close)
    kind, sys.argv[:], packed = _receive(server)
    app = _load(server, kind, packed)
    while True:
        _send(server, *run_client(app, kind, *_receive(server)))


def run_client(app: ClientApp, kind: str, message: Message, context: Context) -> tuple[Any, ...]:
    """Runs one client on the slot's device of this kind.

    Returns ("done", reply, peak bytes), ("failed", error in one line, traceback), or ("unusable", error) if the device
    does not work any more.
    """
    device = None if kind == "cpu" else getattr(torch, kind)
    try:
        if device is not None:
            # Free the memory of the client before: a Trainer is a reference cycle, and torch caches freed memory.
            gc.collect()
            device.empty_cache()
            device.reset_peak_memory_stats()
        reply = app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, expected flwr.app.Message")
        return "done", reply, 0 if device is None else int(device.max_memory_reserved())
    except _OF_CLIENT as error:
        line, lines = _in_one_line(error), traceback.format_exc()
        error.__traceback__ = None  # Its frames refer to the client's tensors.
    try:
        check_device(kind)
    except _OF_CLIENT:
        # Every later client of this process would fail, too.
        return "unusable", f"its device failed: {line}"
    return "failed", line, lines


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def check_device(kind: str) -> None:
    """Computes on the slot's device. Raises if there is none, more than one, or it does not work."""
    if kind == "cpu":
        return
    num_devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if num_devices != 1:
        raise SetupError(f"this slot sees {num_devices} {kind} devices; expected 1", hint="Check the driver.")
    torch.ones(8, device=kind).sum().item()


def _load(server: Connection, kind: str, packed: bytes) -> ClientApp:
    """Unpickles the app. If that fails, reports the error and exits."""
    import cloudpickle  # type: ignore[import-untyped]

    what = "unusable"
    try:
        check_device(kind)
        what = "unloadable"
        app: ClientApp = cloudpickle.loads(packed)
        _send(server, "ready")
        return app
    except _OF_CLIENT as error:
        traceback.print_exc()
        _send(server, what, _in_one_line(error))
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
    """Ends the slot when the server has ended, also while a client runs."""
    with suppress(ProcessLookupError):  # It has ended already.
        wait([os.pidfd_open(pid)])
    _end_process_group()


def _end_process_group() -> NoReturn:
    """Kills this process and its children, such as DataLoader workers."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
