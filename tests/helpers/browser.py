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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.notebook import kernel_environment

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
_ANSWER_LIMIT_S = 30.0
_END_LIMIT_S = 20.0
_POLL_S = 0.05


def find_browser() -> str | None:
    """The variable CHROMIUM, else one of `BROWSERS` on the PATH, else what `make browser` has installed."""
    installed = Path(sys.prefix) / "chromium" / "run"
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, BROWSERS), str(installed) if installed.exists() else None]
    return next(filter(None, found), None)


@contextmanager
def serve_lab(folder: Path, env: Mapping[str, str] | None = None) -> Iterator[Callable[[str], str]]:
    """Serves JupyterLab on the loopback interface, with a token, and with nothing of the user's own settings.

    Yields:
        Gives the address of a notebook in `folder`; waits until the server is up.
    """
    home, token = folder / ".home", secrets.token_hex()
    for name, setting in _SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(setting))
    names = ("JUPYTER_CONFIG", "JUPYTER_DATA", "JUPYTER_RUNTIME", "JUPYTERLAB_SETTINGS", "JUPYTERLAB_WORKSPACES")
    places = {f"{name}_DIR": str(home / name.rpartition("_")[2].lower()) for name in names}
    environment = {**kernel_environment(home, env), **places, "JUPYTER_TOKEN": token}
    options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    options += ["--LabApp.expose_app_in_browser=True"]
    with (home / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )
    facts = home / "runtime" / f"jpserver-{server.pid}.json"

    def address(notebook: str) -> str:
        _wait(lambda: server.poll() is not None or (facts.exists() and facts.read_text().endswith("}")), 60.0, "Lab")
        assert server.poll() is None, (home / "lab.log").read_text()
        return f"{json.loads(facts.read_text())['url']}lab/tree/{notebook}?token={token}"

    try:
        yield address
    finally:
        server.terminate()
        server.wait(_END_LIMIT_S)


@contextmanager
def open_browser(browser: str, folder: Path) -> Iterator[Page]:
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
            yield Page(ours)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Page:
    """One page of the browser at the other end of a socket."""

    def __init__(self, pipe: socket.socket) -> None:
        pipe.settimeout(_ANSWER_LIMIT_S)
        self._pipe = pipe
        self._rest = b""
        self._num_calls = 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def open(self, address: str) -> None:
        """Goes to an address."""
        self._call("Page.navigate", url=address)

    def read(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, limit_s: float) -> Any:
        """Waits until an expression holds, and returns its value."""
        return _wait(lambda: self.read(expression), limit_s, expression)

    def take_picture(self, element: str, path: Path) -> None:
        """Saves what an element shows as PNG."""
        self.read(f"{element}.scrollIntoView({{block: 'nearest'}})")
        clip = {**self.wait(f"{element}.getBoundingClientRect().toJSON()", 5.0), "scale": 1}
        picture = self._call("Page.captureScreenshot", format="png", clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._num_calls += 1
        call = {"id": self._num_calls, "method": method, "params": parameters, **self._session}
        self._pipe.sendall(json.dumps(call).encode() + b"\0")
        while True:
            message = json.loads(self._receive())
            if message.get("id") == self._num_calls:  # The rest are events.
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _receive(self) -> bytes:
        while b"\0" not in self._rest:
            received = self._pipe.recv(1 << 16)
            assert received, "Chromium has ended"
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        return message


class LabNotebook:
    """A notebook that is open in JupyterLab. Cells are counted from 0, with those of text.

    Args:
        page: The browser's page.
        address: Of the notebook.
    """

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        page.open(address)
        # It is called idle as well before it has a kernel.
        name = "document.querySelector('.jp-Toolbar-kernelName')?.textContent"
        page.wait(f"({name} ?? 'No Kernel') != 'No Kernel'", 60.0)
        page.wait("document.querySelector('.jp-Notebook-ExecutionIndicator').dataset.status == 'idle'", 60.0)

    def run_all(self) -> None:
        """Run All Cells of the menu."""
        self._choose("notebook:run-all-cells")
        prompts = "[...document.querySelectorAll('.jp-Notebook .jp-InputPrompt')]"
        self.page.wait(f"{prompts}.some(prompt => prompt.textContent == '[*]:')", 10.0)

    def run(self, cell: int, *, and_all_below: bool = False) -> None:
        """Run Selected Cell of the menu, or Run Selected Cell and All Below."""
        self.page.read(f"jupyterapp.shell.currentWidget.content.activeCellIndex = {cell}")
        self._choose("notebook:run-all-below" if and_all_below else "notebook:run-cell")
        _wait(lambda: self.is_run(cell), 10.0, f"begin of cell {cell}")

    def stop(self) -> None:
        """The Stop button."""
        self._choose("notebook:interrupt-kernel")

    def wait_for(self, cell: int, limit_s: float) -> str:
        """Waits until a cell has ended, and returns what stands below it."""
        try:
            self.page.wait(f"{_prompt(cell)} != '[*]:'", limit_s)
            assert self.is_run(cell), f"cell {cell} was not run: one before it has failed"
        except AssertionError as error:
            text = self.page.read("document.querySelector('.jp-Notebook').innerText")
            raise AssertionError(f"{error}\n{text}") from None
        return self.output(cell)

    def is_run(self, cell: int) -> bool:
        """A cell has been run, or has begun to."""
        return self.page.read(f"{_prompt(cell)} != '[ ]:'")

    def wait_for_element(self, cell: int, selector: str, condition: str, limit_s: float) -> None:
        """Waits until an element below a cell is there and meets a condition, such as `.value > 1`."""
        self.page.wait(f"{_cell(cell)}.querySelector('.jp-Cell-outputArea {selector}')?{condition}", limit_s)

    def output(self, cell: int) -> str:
        """The text that stands below a cell now."""
        return self.page.read(f"{_cell(cell)}.querySelector('.jp-Cell-outputArea').innerText")

    def count(self, cell: int, selector: str) -> int:
        """Number of elements below a cell that a CSS selector finds."""
        return self.page.read(f"{_cell(cell)}.querySelectorAll('.jp-Cell-outputArea {selector}').length")

    def take_picture(self, cell: int, path: Path) -> None:
        """Saves a cell with what stands below it as PNG."""
        self.page.take_picture(_cell(cell), path)

    def _choose(self, command: str) -> None:
        self.page.read(f"void jupyterapp.commands.execute('{command}')")


def _cell(number: int) -> str:
    return f"document.querySelectorAll('.jp-Notebook .jp-Cell')[{number}]"


def _prompt(number: int) -> str:
    """What stands left of a cell of code: "[ ]:", "[*]:" while it waits or runs, "[1]:" afterwards."""
    return f"{_cell(number)}.querySelector('.jp-InputPrompt').textContent"


def _wait(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    deadline_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}"
        time.sleep(_POLL_S)
    return value
