"""Both shells of a notebook's ranks, over a real IPython shell and a kernel that only writes down."""

from __future__ import annotations

import builtins
import contextlib
import getpass
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.notebook.kernel_share import SharedInput, done_by_rank_0, notebook_patches
from unsloth_multigpu.notebook.magic import prefix_output
from unsloth_multigpu.notebook.shell import KernelShell
from unsloth_multigpu.notebook.variables import RankVariables
from unsloth_multigpu.notebook.worker_shell import WorkerShell


class WrittenKernel:
    """Stands for `Kernel`: no worker, and every cell ends as it is told to."""

    def __init__(self) -> None:
        self.current: Any = None
        self.workers: list[Any] = []
        self.begun: list[str] = []
        self.states: list[Mapping[str, Any]] = []
        self.finished: list[BaseException | None] = []
        self.values: dict[str, Any] = {}
        self.outcome: BaseException | None = None
        self.begin_error: Exception | None = None

    def begin(self, source: str, state: Mapping[str, Any], task: Any = None, *, execution_count: int = 0) -> None:
        if self.begin_error is not None:
            raise self.begin_error
        self.begun.append(source)
        self.states.append(state)
        self.current = SimpleNamespace(
            number=len(self.begun),
            error=None,
            failure_error=None,
            stop_s=None,
            is_shown=False,
            main="runs",
            task=task,
            execution_count=execution_count,
        )
        self.current.enter = lambda main: setattr(self.current, "main", main)

    def finish(self, error: BaseException | None) -> BaseException | None:
        self.finished.append(error)
        self.current = None
        return self.outcome

    def send(self, _kind: str, **fields: Any) -> None:
        self.values[fields["key"]] = fields["value"] if fields["error"] is None else fields["error"]["error"]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        yield


class Rank0:
    """A shell that is steered, and what is to be seen of it."""

    def __init__(self, folder: Path) -> None:
        self.shell = make_shell()
        self.kernel = WrittenKernel()
        self.num_ended = 0
        self.shown: list[BaseException] = []
        variables = RankVariables({"RANK": "0"})
        self.in_effect = variables.in_effect()
        self.steering = KernelShell(self.shell, self.kernel, self._count, variables, None)  # type: ignore[arg-type]
        self.shell.showtraceback = lambda exc_tuple=None, **_: self.shown.append((exc_tuple or sys.exc_info())[1])

    def _count(self) -> None:
        self.num_ended += 1

    def run(self, source: str, *, store_history: bool = True) -> Any:
        return self.shell.run_cell(source, store_history=store_history)


def shell_options() -> dict[str, Any]:
    settings = Config()
    settings.HistoryManager.enabled = False
    return {"config": settings, "user_module": types.ModuleType("__main__")}


def make_shell() -> Any:
    return InteractiveShell(**shell_options())


def make_worker_shell(receiver: Any) -> Any:
    """As a worker makes it, but for the one instance that IPython keeps for a process."""

    class Shell(WorkerShell, InteractiveShell):  # type: ignore[misc, unused-ignore]
        pass

    program: Any = object()
    return Shell(receiver, program, **shell_options())


@pytest.fixture
def rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank0]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    trap = builtins.__dict__.get("get_ipython")
    rank_0 = Rank0(tmp_path)
    with rank_0.in_effect:
        rank_0.steering.open()
        yield rank_0
        rank_0.steering.close()
    assert builtins.__dict__.get("get_ipython") is trap


def test_what_is_no_cell_of_the_user_is_none_of_the_ranks(rank_0: Rank0) -> None:
    rank_0.run("x = 1", store_history=False)
    rank_0.run("")
    rank_0.run("  \n")
    rank_0.shell.run_cell("x = 2", silent=True)
    assert rank_0.kernel.begun == rank_0.kernel.finished == []


def test_a_cell_goes_on_behind_a_cell_in_it(rank_0: Rank0) -> None:
    running = []
    rank_0.shell.user_ns["note"] = lambda: running.append(rank_0.kernel.current is not None)
    rank_0.run("get_ipython().run_cell('x = 1', True); note()")
    assert running == [True]


def test_a_cell_begins_also_when_the_device_has_failed(rank_0: Rank0, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    rank_0.run("x = 1")
    monkeypatch.setattr("torch.cuda.get_rng_state", fail)
    assert rank_0.run("x = 2").success
    assert ["device" in state for state in rank_0.kernel.states] == [True, False]


def test_the_cause_is_shown_in_place_of_its_echo(rank_0: Rank0) -> None:
    rank_0.kernel.outcome = cause = DistributedError("rank 1 raised ValueError", hint="See.")

    def fail() -> None:
        rank_0.kernel.current.failure_error = cause
        raise RuntimeError("Connection closed by peer")

    rank_0.shell.user_ns["fail"] = fail
    result = rank_0.run("fail()")
    assert rank_0.shown == [cause]
    assert result.error_in_exec is cause


def test_what_fails_between_two_cells_fails_the_cell(rank_0: Rank0) -> None:
    failed = DistributedError("no group", hint="Restart.")

    def after_cell() -> None:
        raise failed

    rank_0.steering._after_cell = after_cell
    assert rank_0.run("x = 1").error_in_exec is failed
    assert rank_0.shown == [failed]


def test_a_cell_that_cannot_begin_on_the_others_does_not_run_here(
    rank_0: Rank0, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_0.kernel.begin_error = FileNotFoundError("no folder")
    result = rank_0.run("x = 1")
    assert not result.success
    assert "x" not in rank_0.shell.user_ns
    rank_0.kernel.begin_error = None
    assert rank_0.run("x = 1").success
    capsys.readouterr()


def test_an_error_in_a_cell_in_a_cell_is_known_and_the_cell_goes_on(rank_0: Rank0) -> None:
    states = []
    rank_0.shell.user_ns["note"] = lambda: states.append(rank_0.kernel.current.main)
    result = rank_0.run("get_ipython().run_cell('1/0'); note()")
    assert result.success
    assert states == ["runs"]
    assert isinstance(rank_0.kernel.finished[0], ZeroDivisionError)


@pytest.mark.parametrize("name", ["timeit", "time"])
def test_a_measured_function_sees_its_local_variables(rank_0: Rank0, name: str) -> None:
    options = " -n1 -r1" if name == "timeit" else ""
    assert rank_0.run(
        f"def f():\n    a = [1]\n    %{name}{options} a.append(2)\n    return a\nassert f()[-1] == 2"
    ).success


def test_a_front_ends_own_handler_of_errors_is_asked_and_comes_back(rank_0: Rank0) -> None:
    # Colab has one for ImportError.
    handled = []
    rank_0.steering.close()
    rank_0.shell.set_custom_exc((ImportError,), lambda shell, kind, error, tb, tb_offset=None: handled.append(kind))
    rank_0.steering.open()
    rank_0.run("import no_such_module")
    rank_0.run("1 / 0")
    assert handled == [ModuleNotFoundError]
    assert [type(error) for error in rank_0.kernel.finished] == [ModuleNotFoundError, ZeroDivisionError]
    assert [type(error) for error in rank_0.shown] == [ZeroDivisionError]
    rank_0.steering.close()
    rank_0.shell.run_cell("import no_such_module")
    assert handled == [ModuleNotFoundError] * 2


class Waits:
    """Stands for `Receiver`: writes down what is waited for."""

    def __init__(self) -> None:
        self.is_detached = False
        self.kinds: list[str] = []

    def make(self, kind: str, make: Any, *, is_value: bool = True) -> Any:
        if self.is_detached:
            return make()
        self.kinds.append(kind if is_value else f"({kind})")
        return {"!exit 3": 3, "x = !echo no": ["a"], "input('q')": "typed"}.get(kind)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    for owner, name in ((builtins, "input"), (getpass, "getpass"), (sys, "breakpointhook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    waits: Any = Waits()
    sys.breakpointhook = lambda: None
    SharedInput(waits).open()
    shell = make_worker_shell(waits)
    with done_by_rank_0(shell, waits, RankVariables({}, {"RANK": None})):
        yield SimpleNamespace(shell=shell, waits=waits)


def test_a_worker_notes_errors_that_ipython_keeps_to_itself(worker: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert worker.shell.run_cell("%%capture\n1/0").success
    assert isinstance(worker.shell.shown_error, ZeroDivisionError)
    # As %%time does before IPython 9.
    worker.shell.register_magic_function(lambda _line: worker.shell.showtraceback(), "line", "shows")
    assert worker.shell.run_cell("try: int('x')\nexcept ValueError:\n    %shows").success
    assert isinstance(worker.shell.shown_error, ValueError)
    assert worker.shell.run_cell("get_ipython().run_cell('def f(:')").success
    assert isinstance(worker.shell.shown_error, SyntaxError)
    capfd.readouterr()


def test_a_worker_keeps_no_figures(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    assert worker.shell.run_cell("1").success
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", SimpleNamespace(close=closed.append))  # type: ignore[arg-type]
    assert worker.shell.run_cell("1").success
    assert closed == ["all"]


def test_a_worker_pages_nothing_and_reads_no_history(worker: Any, capfd: pytest.CaptureFixture[str]) -> None:
    from IPython.core import page

    worker.shell.user_ns["page"] = page.page
    assert worker.shell.run_cell("page('text')").success
    assert "reads the history" in str(worker.shell.run_cell("%rerun").error_in_exec)
    capfd.readouterr()


def test_output_of_a_worker_has_its_rank_before_each_line() -> None:
    header = "---- cell 3\nx\n----\n"
    assert (
        prefix_output(f"{header}a\n\n 10%\r 20%\r\nend", header, 1)
        == "[rank1] a\n[rank1] \n[rank1]  20%\n[rank1] end\n"
    )
    assert prefix_output(header, header, 1) == ""
    long = prefix_output("a\n" * 1500, header, 2)
    assert long.startswith("[rank2] ... 500 more lines in the log\n")
    assert long.count("\n") == 1001


def test_a_token_is_told_to_nobody() -> None:
    kinds: list[str] = []

    def make(kind: str, call: Any, *, is_value: bool) -> Any:
        kinds.append(kind)
        return call()

    patches = notebook_patches(make)
    (login,) = (patch for patch in patches if patch.target == "huggingface_hub._login:login")
    assert login.wrap(lambda token: f"with {token}", "hf_secret") == "with hf_secret"
    assert kinds == ["login()"]
