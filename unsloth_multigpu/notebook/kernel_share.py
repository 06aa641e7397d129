"""What rank 0 does for all ranks: commands, magics, logins, questions. The others wait for its result or error.

The kernel and its workers use this module. It replaces public methods of IPython on the shell object of a process.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.group.outcome import failure, value_of
from unsloth_multigpu.launch.rank import last_collective
from unsloth_multigpu.notebook.kernel import Cell, Kernel
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.wire.process import set_variables

# Magics that change the machine, ask the user, measure, or use the front end. Only rank 0 runs them, and programs that
# they start do not get the variables of a rank. %sx and %system are not listed: they call `getoutput`, which shares.
_RANK_0_CELL_MAGICS = """
bash bigquery cmd file html javascript js latex markdown memit mprun perl pypy python python2 python3 ruby script sh
shell sql svg timeit writefile
"""
_RANK_0_LINE_MAGICS = """
autosave bookmark cat clear conda config connect_info cp debug doctest_mode ed edit gui history killbgscripts ldir less
lf lk ll load loadpy logstart logstop ls lsmagic lx magic mamba man matplotlib memit micromamba mkdir more mprun mv
notebook page pastebin pdb pdoc pfile pinfo pinfo2 pip psearch psource pycat qtconsole quickref ranks recall rep rm
rmdir save sc shell store subshell tb tensorboard timeit uv
"""
# These read the history of the shell, which only rank 0 has.
_HISTORY_MAGICS = frozenset({"macro", "rerun"})
# Modules with the magics of front ends, which workers do not have.
_FRONT_ENDS = ("ipykernel.", "google.colab.")
# The module of magics that are aliases of system commands.
_ALIASES = "IPython.core.alias."

_LOGINS = ("login", "logout", "notebook_login", "interpreter_login")
_HUB = "huggingface_hub>=0.24"
_ASKS = "Asks the user only on rank 0; the other ranks read the token from its file."
_MESSAGE_CHARACTERS = 120


class LeftAloneError(DistributedError):
    """Rank 0 has left the cell without computing a value that this rank waits for."""


class Sharer:
    """Numbers the values that rank 0 computes for all ranks; base of the side that sends and the side that receives.

    A value has a label, such as the text of a command. Its key is the label and how often the cell has used it. Ranks
    that take the same path through a cell use the same keys; a rank on another path does not get a wrong value.

    Attributes:
        is_apart: Not all ranks run the code that this rank runs now.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Called when a cell begins. An interrupted one may have left the state as it was within `detached`."""
        self._counts: Counter[str] = Counter()
        self._depth = 0
        self.is_apart = False

    @contextmanager
    def detached(self, *, is_apart: bool = False) -> Iterator[None]:
        """Within the context this rank computes values itself, and shares none. `is_apart`: see the class."""
        before, self.is_apart = self.is_apart, is_apart or self.is_apart
        self._depth += 1
        try:
            yield
        finally:
            self._depth = max(0, self._depth - 1)
            self.is_apart = before

    def _next_key(self, label: str) -> str:
        self._counts[label] += 1
        return f"{label}/{self._counts[label]}"


class Publisher(Sharer):
    """On rank 0: computes values and sends them to the workers."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    @property
    def is_abandoned(self) -> bool:
        """True if all other ranks have ended the current cell."""
        return self._kernel.current is not None and not self._kernel.pending()

    def share(self, label: str, compute: Callable[[], Any], *, is_value: bool = True) -> Any:
        """Calls `compute` and sends its result or error to the other ranks. A nested call only calls `compute`.

        Args:
            label: Names the value, with the text of the command or question; equal on all ranks.
            compute: Computes the value, on this rank only. The other ranks get None for a result that is not a text, an
                integer or a list of lines.
            is_value: See `Receiver.wait_for`.
        """
        cell = self._kernel.current
        if cell is None:
            return compute()
        if self._depth:
            return _stoppable(cell, compute)
        sent = {"key": self._next_key(label), "cell_number": cell.number}
        # KeyboardInterrupt is not sent: Stop interrupts each rank.
        try:
            with self.detached():
                value = _stoppable(cell, compute)
        except Exception as error:
            self._kernel.send("value", **sent, outcome=failure(error))
            raise
        self._kernel.send("value", **sent, outcome={"value": _plain(value)})
        return value


class Receiver(Sharer):
    """On a rank above 0: waits for the values that rank 0 computes in the current cell.

    The main thread runs cells and waits; the thread that receives messages calls `put` and `note_left`. `send` sends a
    message to the kernel.

    Attributes:
        cell_number: Number of the current cell; 0 = none.
        is_replay: The cell is one that rank 0 ran before `enable_multi_gpu()`.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        super().__init__()
        self._send = send
        self._values: dict[str, dict[str, Any]] = {}
        self._has_news = threading.Condition()
        # Number of the last cell that rank 0 has left.
        self._left_cell = 0
        self.cell_number = 0
        self.is_replay = True

    def enter(self, cell_number: int, *, is_replay: bool) -> None:
        """Called when a cell begins."""
        self.begin()
        with self._has_news:
            self._values = {key: v for key, v in self._values.items() if v["cell_number"] >= cell_number}
        self.is_replay, self.cell_number = is_replay, cell_number

    @property
    def is_abandoned(self) -> bool:
        """True if rank 0 has left the current cell, and so computes no more values in it."""
        return self._left_cell >= self.cell_number > 0

    def put(self, message: dict[str, Any]) -> None:
        """Stores a message with a value of rank 0."""
        with self._has_news:
            self._values[message["key"]] = message
            self._has_news.notify_all()

    def note_left(self, cell_number: int) -> None:
        """Records that rank 0 has left a cell."""
        with self._has_news:
            self._left_cell = cell_number
            self._has_news.notify_all()

    def share(self, label: str, compute: Callable[[], Any], *, is_value: bool = True) -> Any:
        """The counterpart of `Publisher.share`: waits for the value, or computes it within `detached`."""
        return compute() if self._depth else self.wait_for(label, is_value=is_value)

    def wait_for(self, label: str, *, is_value: bool = True) -> Any:
        """Waits without a limit until rank 0 has computed the value, and returns it.

        `is_value` says that the cell needs the value. If not, as for `%pip`, a replayed cell gets None at once, because
        rank 0 has run the command already.

        Raises:
            DistributedError: Rank 0 has raised an error. The one raised here is also of that error's class.
            LeftAloneError: Rank 0 has left the cell without computing the value, or ran it before this rank existed.
        """
        line = " ".join(label.split())
        what = line if len(line) <= _MESSAGE_CHARACTERS else f"{line[:_MESSAGE_CHARACTERS]}..."
        if self.is_replay:
            if is_value:
                raise LeftAloneError(
                    f"{what} was run before enable_multi_gpu(), and its value is no longer known.",
                    hint="Restart the kernel, and call enable_multi_gpu() in the first cell.",
                )
            return None
        message = self._take(self._next_key(label))
        if message is None:
            raise LeftAloneError(
                f"rank 0 has left the cell without {what}.", hint="Let all ranks run the same code in a cell."
            )
        return value_of(message["outcome"], what)

    def _take(self, key: str) -> dict[str, Any] | None:
        """Waits for the message with a key, and tells the kernel about the wait; None = rank 0 has left the cell."""
        number = self.cell_number

        def has_come() -> bool:
            return self._left_cell >= number or self._values.get(key, {}).get("cell_number") == number

        with self._has_news:
            if not has_come():
                self._send("waits", cell_number=number, collective=last_collective())
                self._has_news.wait_for(has_come)
                self._send("waits", cell_number=number, collective=None)
            return self._values.pop(key, None)


def _stoppable(cell: Cell, compute: Callable[[], Any]) -> Any:
    """Calls `compute`, and raises if Stop has ended it: IPython would end only the command, and continue the cell."""
    stop_s = cell.stop_s
    value = compute()
    if cell.stop_s != stop_s:
        raise KeyboardInterrupt("Stop was pressed.")
    return value


def _plain(value: Any) -> Any:
    """Converts a value to JSON: None if it is not an integer, a text or a list of lines."""
    if isinstance(value, list):
        return [str(line) for line in value]
    return str(value) if isinstance(value, str) else value if isinstance(value, int) else None


def like_ipython(output: Any) -> Any:
    """Converts the output of a command or magic to IPython's types, whose attributes are `x.s`, `x.l` and so on."""
    from IPython.utils.text import LSString, SList

    return SList(output) if isinstance(output, list) else LSString(output) if isinstance(output, str) else output


@contextmanager
def variables_set(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables within the context; None = not set.

    With the variables of a rank, a program that a cell starts (`!python other.py`) would wait for the other ranks. Has
    no effect in other threads than the main one: the running cell needs the variables.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: os.environ.get(name) for name in values}
    set_variables(values)
    try:
        yield
    finally:
        set_variables(before)


def is_rank_0_magic(kind: str, name: str, magic: Any) -> bool:
    """True for a magic that only rank 0 runs.

    `kind` is "line" or "cell", and `name` has no percent signs. `magic` is the magic's function; None = the shell
    has no such magic.
    """
    if magic is None or f"{getattr(magic, '__module__', '')}.".startswith((*_FRONT_ENDS, _ALIASES)):
        return True
    return name in (_RANK_0_LINE_MAGICS if kind == "line" else _RANK_0_CELL_MAGICS).split()


@contextmanager
def done_by_rank_0(
    shell: Any, sharer: Publisher | Receiver, variables_before: Mapping[str, str | None]
) -> Iterator[None]:
    """Within the context, the shell runs commands and magics on rank 0 only, and the other ranks get the results.

    `sharer` sends the results on rank 0, and waits for them on other ranks. Programs that a cell starts get
    `variables_before`, those of the kernel before it became a rank.
    """
    from IPython.core.error import UsageError

    start, read = shell.system, shell.getoutput
    line_magic, cell_magic = shell.run_line_magic, shell.run_cell_magic
    expand, local_scope = type(shell).var_expand, type(shell).get_local_scope

    def share(label: str, run: Callable[[], Any], *, is_value: bool) -> Any:
        with variables_set(variables_before):
            return like_ipython(sharer.share(label, run, is_value=is_value))

    # Both look up names in the frame of the user's code, which IPython finds by its depth on the stack.
    def var_expand(cmd: str, depth: int = 0, *args: Any, **kwargs: Any) -> Any:
        return expand(shell, cmd, _real_depth(depth), *args, **kwargs)

    def get_local_scope(stack_depth: int) -> Any:
        return local_scope(shell, _real_depth(stack_depth))

    def system(command: str) -> None:
        def run() -> Any:
            start(command)
            return shell.user_ns.get("_exit_code")

        exit_code = share(f"!{command}", run, is_value=False)
        if exit_code is not None:
            shell.user_ns["_exit_code"] = exit_code

    def getoutput(command: str, split: bool = True, depth: int = 0) -> Any:
        return share(f"x = !{command}", lambda: read(command, split=split, depth=depth), is_value=True)

    def run_line_magic(name: str, line: str, _stack_depth: int = 1) -> Any:
        if name in _HISTORY_MAGICS:
            raise UsageError(f"%{name} reads the history, which only rank 0 has: copy the cell.")
        run = functools.partial(line_magic, name, line, _stack_depth)
        if not is_rank_0_magic("line", name, shell.find_line_magic(name)):
            return run()
        return share(f"%{name} {line}".rstrip(), run, is_value=False)

    def run_cell_magic(name: str, line: str, cell: str) -> Any:
        run = functools.partial(cell_magic, name, line, cell)
        if not is_rank_0_magic("cell", name, shell.find_cell_magic(name)):
            return run()
        return share(f"%%{name} {line}".rstrip(), run, is_value=False)

    with ExitStack() as stack:
        for replacement in (var_expand, get_local_scope, system, getoutput, run_line_magic, run_cell_magic):
            stack.enter_context(instance_attribute(shell, replacement.__name__, replacement))
        yield


def _real_depth(depth: int) -> int:
    """Converts a stack depth that IPython has passed, which does not count the frames of this module, to one that does.

    Called by the replacement of a method to which IPython passes the depth. Depths count from the method's caller.
    """
    frame, real_depth = sys._getframe(2), 1
    while frame.f_back is not None and (depth > 0 or frame.f_globals is globals()):
        depth -= frame.f_globals is not globals()
        frame, real_depth = frame.f_back, real_depth + 1
    return real_depth


def notebook_patches(share: Callable[..., Any]) -> list[Patch]:
    """Returns the patches of logins, which ask the user. `share` is `Publisher.share` or `Receiver.share`."""
    return [
        Patch(f"huggingface_hub._login:{name}", _HUB, functools.partial(_once, share, name), _ASKS, optional=True)
        for name in _LOGINS
    ]


def _once(share: Callable[..., Any], name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # The label has no arguments: a token that is given to `login` is not sent to other ranks.
    return share(f"{name}()", lambda: original(*args, **kwargs), is_value=False)


def read_ranks(text: str, num_ranks: int) -> frozenset[int]:
    """Parses the ranks after %%rank: "0", "0,2" or "all"."""
    from IPython.core.error import UsageError

    if text.strip() == "all":
        return frozenset(range(num_ranks))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < num_ranks for part in parts):
        raise UsageError(f"%%rank: {text.strip()!r}; expected 0 .. {num_ranks - 1}, a list such as 0,1, or all.")
    return frozenset(map(int, parts))
