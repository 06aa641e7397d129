"""JupyterLab in headless Chromium, driven by the commands of its menu and buttons, and by what the page shows.

Chromium is steered over a pipe by its DevTools protocol (https://chromedevtools.github.io/devtools-protocol), so that
no driver program is needed and no port is opened.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.notebook import kernel_environment
from tests.helpers.run import free_port

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    # The sandbox needs rights that root and containers lack; the pages are our own.
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--window-size=1400,1400",
)
_SETTINGS = {
    # Else a question covers a part of the notebook.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Else cells outside the window are not in the page.
    "notebook-extension/tracker": {"windowingMode": "none"},
}
_LIMIT_S = 60.0
# It is called idle as well before it has a kernel.
_IS_READY = """
(document.querySelector('.jp-Toolbar-kernelName')?.textContent ?? 'No Kernel') != 'No Kernel'
&& document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status == 'idle'
"""


def find_browser() -> str | None:
    """The variable CHROMIUM, else one of `BROWSERS` on the PATH, else what `make browser` has installed."""
    installed = Path(sys.prefix) / "chromium" / "run"
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, BROWSERS), str(installed) if installed.exists() else None]
    return next(filter(None, found), None)


@contextmanager
def serve_lab(folder: Path, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Serves JupyterLab on the loopback interface, with a token, and with nothing of the user's own settings.

    Yields:
        Address with two places: the notebook in `folder` goes between them.
    """
    home, port, token = folder / ".home", free_port(), secrets.token_hex()
    for name, setting in _SETTINGS.items():
        file = home / "lab" / "user-settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(setting))
    places = {"JUPYTER_CONFIG_DIR": str(home), "JUPYTER_DATA_DIR": str(home / "data"), "JUPYTER_TOKEN": token}
    options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command = [sys.executable, "-m", "jupyterlab", *options, "--LabApp.expose_app_in_browser=True"]
    with (home / "lab.log").open("w") as log:
        environment = {**kernel_environment(home, env), **places}
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token={token}"
    finally:
        server.terminate()
        server.wait(_LIMIT_S)


@contextmanager
def open_browser(browser: str, folder: Path) -> Iterator[LabNotebook]:
    """Starts Chromium with a profile of its own in `folder`, and with one empty page."""
    ours, theirs = socket.socketpair()
    profile = folder / ".chromium"

    def take_pipe() -> None:
        end = theirs.fileno()
        os.dup2(os.dup2(end, 100), 3)  # Chromium reads from descriptor 3 and writes to descriptor 4.
        os.dup2(100, 4)

    profile.mkdir()
    with ours, (profile / "log").open("w") as log:
        with theirs:
            process = subprocess.Popen(
                [browser, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
                pass_fds=(3, 4),
                preexec_fn=take_pipe,
                env={**os.environ, "HOME": str(profile)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield LabNotebook(ours)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class LabNotebook:
    """A page of the browser at the other end of a socket, with a notebook. Cells are counted from 0, with texts."""

    def __init__(self, pipe: socket.socket) -> None:
        pipe.settimeout(_LIMIT_S)
        self._pipe = pipe
        self._rest = b""
        self._num_calls = 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def open(self, address: str) -> None:
        """Goes to a notebook, and waits for its server and its kernel."""
        deadline_s = time.monotonic() + _LIMIT_S
        while "errorText" in self._call("Page.navigate", url=address):
            assert time.monotonic() < deadline_s, "JupyterLab does not answer"
            time.sleep(0.5)
        self.wait(_IS_READY, _LIMIT_S)

    def choose(self, command: str, cell: int | None = None) -> None:
        """Chooses a command of the menu or a button, after the selection of a cell."""
        if cell is not None:
            self.read(f"jupyterapp.shell.currentWidget.content.activeCellIndex = {cell}")
        self.read(f"void jupyterapp.commands.execute('notebook:{command}')")

    def wait_for(self, cell: int, limit_s: float) -> str:
        """Waits until a cell has ended, and returns what stands below it."""
        self.wait(f"/[0-9]/.test({prompt_of(cell)})", limit_s)
        return self.output(cell)

    def output(self, cell: int, expression: str = "innerText") -> Any:
        """What an expression says of the part of the page below a cell: its text."""
        return self.read(f"{_cell(cell)}.querySelector('.jp-Cell-outputArea').{expression}")

    def read(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, limit_s: float) -> None:
        """Waits until an expression holds."""
        deadline_s = time.monotonic() + limit_s
        while not self.read(expression):
            shown = "document.querySelector('.jp-Notebook')?.innerText"
            assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {expression}\n{self.read(shown)}"
            time.sleep(0.05)

    def take_picture(self, cell: int, path: Path) -> None:
        """Saves a cell with what stands below it as PNG."""
        self.read(f"{_cell(cell)}.scrollIntoView({{block: 'nearest'}})")
        clip = {**self.read(f"{_cell(cell)}.getBoundingClientRect().toJSON()"), "scale": 1}
        picture = self._call("Page.captureScreenshot", format="png", clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._num_calls += 1
        call = {"id": self._num_calls, "method": method, "params": parameters, **self._session}
        self._pipe.sendall(json.dumps(call).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                received = self._pipe.recv(1 << 16)
                assert received, "Chromium has ended"
                self._rest += received
            answer, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(answer)
            if message.get("id") == self._num_calls:  # The rest are events.
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]


def prompt_of(cell: int) -> str:
    """What stands left of a cell of code: "[ ]:", "[*]:" while it waits or runs, "[1]:" afterwards."""
    return f"{_cell(cell)}.querySelector('.jp-InputPrompt').textContent"


def _cell(number: int) -> str:
    return f"document.querySelectorAll('.jp-Notebook .jp-Cell')[{number}]"
