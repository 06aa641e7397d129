"""Drives a real Jupyter kernel as a front end does: cells one by one, Stop, and what came out of them."""

from __future__ import annotations

import os
import queue
import re
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
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
        seconds: From the request, or from Stop, to the kernel's reply.
    """

    text: str
    error: str
    value: str
    traceback: tuple[str, ...]
    seconds: float

    def well(self) -> str:
        """Its text, after a good end."""
        assert (self.error, self.traceback) == ("", ()), self
        return self.text.replace("\r\n", "\n").strip()


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
        # By channel: what has come for other requests than the one that was waited for.
        self._kept: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
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

    def run(self, source: str, timeout_s: float = 120.0, **how: Any) -> CellResult:
        """Runs one cell and waits for its end; `how` as in `begin`."""
        return self.finish(self.begin(source, **how), timeout_s)

    def well(self, source: str, **how: Any) -> str:
        """What a cell gives that has to end well."""
        return self.run(source, **how).well()

    def stop(self, source: str, at: str = "go", press: Callable[[NotebookRun], None] | None = None) -> CellResult:
        """Runs one cell until it has printed `at`, and presses Stop, from which its seconds count."""
        message_id = self.begin(source)
        self.wait_for_text(at)
        self._begin_s = time.monotonic()
        (press or NotebookRun.interrupt)(self)
        return self.finish(message_id, 400.0)

    def hidden(self, source: str) -> CellResult:
        """Runs code of a front end's own, which is no cell."""
        return self.run(source, store_history=False)

    def begin(self, source: str, subshell: str | None = None, **how: Any) -> str:
        """Begins one cell, or code that is none by `store_history=False` or `silent=True`, in a subshell where one is
        named; give what it returns to `finish`."""
        content = {"code": source, "silent": False, "store_history": True, "user_expressions": {}, **how}
        content |= {"allow_stdin": True, "stop_on_error": False}
        # Front ends name the cell.
        metadata = {} if how else {"cellId": uuid.uuid4().hex}
        message = self.client.session.msg("execute_request", content, metadata=metadata)
        message["header"] |= {"subshell_id": subshell} if subshell else {}
        self._begin_s = time.monotonic()
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def control(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request that a kernel takes while a cell runs, and returns the reply's content."""
        message = self.client.session.msg(kind, dict(content))
        self.client.control_channel.send(message)
        return self._answer("control", message["header"]["msg_id"], time.monotonic() + 30)["content"]

    def finish(self, message_id: str, timeout_s: float = 120.0) -> CellResult:
        """Waits for the end of a cell. One that does not come is a failure, and not a hang of the test."""
        deadline_s = self._begin_s + timeout_s
        outputs: list[tuple[str, dict[str, Any]]] = []
        while (message := self._answer("iopub", message_id, deadline_s))["content"].get("execution_state") != "idle":
            outputs.append((message["msg_type"], message["content"]))
        reply = self._answer("shell", message_id, deadline_s)["content"]
        return CellResult(
            text=_plain("".join(_text_of(kind, content) for kind, content in outputs)),
            error=reply.get("ename", ""),
            value=_plain(reply.get("evalue", "")),
            traceback=tuple(_plain("\n".join(c["traceback"])) for kind, c in outputs if kind == "error"),
            seconds=time.monotonic() - self._begin_s,
        )

    def reply(self, message_id: str) -> dict[str, Any]:
        """Waits for the reply to a request that is no code, such as one for completions."""
        return self._answer("shell", message_id, time.monotonic() + 30)["content"]

    def wait_for_event(self, name: str) -> dict[str, Any]:
        """Waits for an event of the debugger, and returns what it says."""
        found = self._wait("iopub", lambda m: m["content"].get("event") == name, time.monotonic() + 30)
        return found["content"].get("body", {})

    def wait_for_text(self, text: str) -> None:
        """Waits until a cell that runs has printed `text` at once, which is not in its result then."""

        def is_wanted(message: dict[str, Any]) -> bool:
            return message["msg_type"] == "error" or text in _text_of(message["msg_type"], message["content"])

        message = self._wait("iopub", is_wanted, time.monotonic() + 300)
        assert message["msg_type"] != "error", message["content"]

    def _answer(self, channel: str, message_id: str, deadline_s: float) -> dict[str, Any]:
        return self._wait(channel, lambda m: m["parent_header"].get("msg_id") == message_id, deadline_s)

    def _wait(self, channel: str, is_wanted: Callable[[dict[str, Any]], bool], deadline_s: float) -> dict[str, Any]:
        """The first message of one channel that is wanted; others are kept."""
        get, kept = getattr(self.client, f"get_{channel}_msg"), self._kept[channel]
        for place, message in enumerate(kept):
            if is_wanted(message):
                return kept.pop(place)
        while True:
            try:
                kept.append(get(timeout=_LOOK_S))
            except queue.Empty:
                assert self._manager.is_alive(), f"the kernel has ended\n{kept}"
                assert time.monotonic() < deadline_s, f"nothing in time\n{kept}"
                continue
            if is_wanted(kept[-1]):
                return kept.pop()

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
