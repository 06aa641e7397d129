"""Drives a real Jupyter kernel as a front end does: cells one by one, Stop, and what came out of them."""

from __future__ import annotations

import os
import queue
import re
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager

from tests.helpers.run import ROOT, environment_with, free_port

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_LOOK_S = 0.2


@dataclass(frozen=True)
class CellResult:
    """What one cell gave.

    Attributes:
        text: What it printed and displayed, without colours.
        error: Name of the exception that its reply names; "" = it ended well.
        value: The message of that exception.
        traceback: What was shown of exceptions, without colours; one entry for each that was shown.
        seconds: From the request to the kernel's reply.
    """

    text: str
    error: str
    value: str
    traceback: tuple[str, ...]
    seconds: float


class NotebookRun:
    """A kernel of its own. Use it in `with`, or close it.

    Args:
        folder: Where it runs.
        env: Variables beside this process's; those of UNSLOTH_MULTIGPU_* are not inherited.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        own = kernel_environment(folder, env)
        self.folder = folder
        self._manager = KernelManager(kernel_name="python3")
        self._manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        for channel in ("shell", "iopub", "stdin", "hb", "control"):
            setattr(self._manager, f"{channel}_port", free_port())
        self._manager.start_kernel(cwd=str(folder), env=own)
        # What has come for other requests than the one that was waited for.
        self._kept: list[tuple[Any, dict[str, Any]]] = []
        self.client = self._manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
        except RuntimeError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The kernel's process."""
        pid = self._manager.provisioner.pid
        assert pid is not None
        return pid

    def run(self, source: str, timeout_s: float = 60.0) -> CellResult:
        """Runs one cell and waits for its end."""
        return self.finish(self.begin(source), timeout_s)

    def begin(self, source: str) -> str:
        """Begins one cell; give what it returns to `finish`."""
        # Front ends name the cell.
        return self._execute(source, store_history=True, metadata={"cellId": uuid.uuid4().hex})

    def hidden(self, source: str, timeout_s: float = 60.0) -> CellResult:
        """Runs code of a front end's own, which is no cell."""
        return self.finish(self.begin_hidden(source), timeout_s)

    def silent(self, source: str, timeout_s: float = 60.0) -> CellResult:
        """Runs code as `client.execute(source, silent=True)` does, which is no cell either."""
        return self.finish(self._execute(source, store_history=True, silent=True), timeout_s)

    def begin_hidden(self, source: str, subshell: str | None = None) -> str:
        """Begins code of a front end's own, in a subshell where one is named; give what it returns to `finish`."""
        return self._execute(source, store_history=False, header={"subshell_id": subshell} if subshell else {})

    def _execute(
        self,
        source: str,
        *,
        store_history: bool,
        silent: bool = False,
        metadata: Mapping[str, Any] | None = None,
        header: Mapping[str, Any] | None = None,
    ) -> str:
        content = {"code": source, "silent": silent, "store_history": store_history, "user_expressions": {}}
        content |= {"allow_stdin": True, "stop_on_error": False}
        message = self.client.session.msg("execute_request", content, metadata=dict(metadata or {}))
        message["header"].update(header or {})
        self._begin_s = time.monotonic()
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def control(self, kind: str, content: Mapping[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
        """Sends a request that a kernel takes while a cell runs, and returns the reply's content."""
        message = self.client.session.msg(kind, dict(content))
        self.client.control_channel.send(message)
        return self._next(self.client.get_control_msg, message["header"]["msg_id"], time.monotonic() + timeout_s, [])[1]

    def finish(self, message_id: str, timeout_s: float = 60.0) -> CellResult:
        """Waits for the end of a cell. One that does not come is a failure, and not a hang of the test."""
        deadline_s = self._begin_s + timeout_s
        outputs: list[tuple[str, dict[str, Any]]] = []
        while True:
            kind, content = self._next(self.client.get_iopub_msg, message_id, deadline_s, outputs)
            if kind == "status" and content["execution_state"] == "idle":
                break
            outputs.append((kind, content))
        _, reply = self._next(self.client.get_shell_msg, message_id, deadline_s, outputs)
        return CellResult(
            text=_plain("".join(_text_of(kind, content) for kind, content in outputs)),
            error=reply.get("ename", ""),
            value=_plain(reply.get("evalue", "")),
            traceback=tuple(_plain("\n".join(c["traceback"])) for kind, c in outputs if kind == "error"),
            seconds=time.monotonic() - self._begin_s,
        )

    def reply(self, message_id: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """Waits for the reply to a request that is no code, such as one for completions."""
        return self._next(self.client.get_shell_msg, message_id, time.monotonic() + timeout_s, [])[1]

    def wait_for_event(self, name: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """Waits for an event of the debugger, and returns what it says."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=_LOOK_S)
                if message["msg_type"] == "debug_event" and message["content"]["event"] == name:
                    return message["content"].get("body", {})
                self._kept.append((self.client.get_iopub_msg, message))
        raise AssertionError(f"no event {name!r} within {timeout_s:g} s")

    def _next(self, get: Any, message_id: str, deadline_s: float, outputs: list[Any]) -> tuple[str, dict[str, Any]]:
        for place, (channel, message) in enumerate(self._kept):
            if channel == get and message["parent_header"].get("msg_id") == message_id:
                del self._kept[place]
                return message["msg_type"], message["content"]
        while True:
            try:
                message = get(timeout=_LOOK_S)
            except queue.Empty:
                assert self._manager.is_alive(), f"the kernel has ended\n{outputs}"
                assert time.monotonic() < deadline_s, f"no end of the cell in time\n{outputs}"
                continue
            if message["parent_header"].get("msg_id") == message_id:
                return message["msg_type"], message["content"]
            self._kept.append((get, message))

    def wait_for_text(self, text: str, timeout_s: float = 60.0) -> None:
        """Waits until a cell that runs has printed `text`. What it printed so far is not in its result then."""
        deadline_s, seen = time.monotonic() + timeout_s, ""
        while text not in seen:
            assert time.monotonic() < deadline_s, f"{text!r} did not come: {seen!r}"
            try:
                message = self.client.get_iopub_msg(timeout=_LOOK_S)
            except queue.Empty:
                assert self._manager.is_alive(), f"the kernel has ended: {seen!r}"
                continue
            assert message["msg_type"] != "error", message["content"]
            seen += _text_of(message["msg_type"], message["content"])

    def interrupt(self) -> None:
        """Stop, as the front end's button."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """Restart, as the front end's button."""
        self._manager.restart_kernel(now=False)
        self.client.wait_for_ready(timeout=60)

    def children(self) -> list[psutil.Process]:
        """Living processes that the kernel has started, and theirs."""
        return [p for p in psutil.Process(self.pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        """Ends the kernel, whatever it is doing."""
        self.client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def __enter__(self) -> NotebookRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kernel_environment(folder: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """All variables of a kernel: this process's without UNSLOTH_MULTIGPU_*, those of every test run, and `env`."""
    return environment_with({"IPYTHONDIR": str(folder / ".ipython"), **(env or {})})


def oldest_ipython(*, or_any: bool = False) -> dict[str, str]:
    """Variables by which a kernel, and with it its workers, runs on the oldest supported IPython and ipykernel.

    Where these are not installed the test is skipped, or with `or_any` runs on those that are.
    """
    packages = Path(sys.prefix) / "oldest-ipython"
    if or_any and not packages.is_dir():
        return {}
    if not packages.is_dir():
        pytest.skip(f"{packages} is missing: `make setup` installs IPython 7.34 and ipykernel 6.17.1 there")
    return {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}


def _text_of(kind: str, content: Mapping[str, Any]) -> str:
    if kind == "stream":
        return str(content["text"])
    if kind in ("execute_result", "display_data"):
        return str(content["data"].get("text/plain", "")) + "\n"
    return ""


def _plain(text: str) -> str:
    return _ESCAPES.sub("", text)
