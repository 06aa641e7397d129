"""The shell of a notebook's rank 0, over a real IPython shell and a kernel without workers."""

import asyncio
import builtins
import sys
import types

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from unsloth_multigpu.notebook.kernel import Kernel
from unsloth_multigpu.notebook.kernel_share import notebook_patches
from unsloth_multigpu.notebook.shell import KernelShell


class WrittenKernel(Kernel):
    """A kernel without workers, which writes down how its cells begin and end."""

    def __init__(self):
        super().__init__([], lambda: -1)
        self.states = []
        self.finished = []

    def begin(self, source, random_state, *args, **kwargs):
        self.states.append(random_state)
        return super().begin(source, random_state, *args, **kwargs)

    def finish(self, error):
        self.finished.append(error)
        return super().finish(error)


class Rank0:
    """A shell that is steered, and what is to be seen of it."""

    def __init__(self, folder):
        settings = Config()
        settings.HistoryManager.enabled = False
        self.shell = InteractiveShell(config=settings, user_module=types.ModuleType("__main__"))
        self.kernel = WrittenKernel()
        self.shown = []
        self.steering = KernelShell(self.shell, self.kernel, lambda: None, {"RANK": None}, None)
        self.shell.showtraceback = lambda exc_tuple=None, **_: self.shown.append((exc_tuple or sys.exc_info())[1])

    def open(self):
        """As in a cell, which ends at once."""
        self.steering.open("", 1)
        self.kernel.cell = None

    def run(self, source):
        return self.shell.run_cell(source, store_history=True)


@pytest.fixture
def rank_0(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    trap = builtins.__dict__.get("get_ipython")
    rank_0 = Rank0(tmp_path)
    rank_0.open()
    yield rank_0
    rank_0.steering.close()
    assert builtins.__dict__.get("get_ipython") is trap


def test_a_cell_begins_also_when_the_device_has_failed(rank_0, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    rank_0.run("x = 1")
    monkeypatch.setattr("torch.cuda.get_rng_state", fail)
    assert rank_0.run("x = 2").success
    assert ["device" in state for state in rank_0.kernel.states[-2:]] == [True, False]


def test_a_front_ends_own_handler_of_errors_is_asked_and_comes_back(rank_0):
    # Colab has one for ImportError.
    handled = []
    rank_0.steering.close()
    rank_0.shell.set_custom_exc((ImportError,), lambda shell, kind, error, tb, tb_offset=None: handled.append(kind))
    rank_0.open()
    rank_0.run("import no_such_module")
    rank_0.run("1 / 0")
    assert handled == [ModuleNotFoundError]
    assert [type(error) for error in rank_0.kernel.finished] == [ModuleNotFoundError, ZeroDivisionError]
    assert [type(error) for error in rank_0.shown] == [ZeroDivisionError]
    rank_0.steering.close()
    rank_0.shell.run_cell("import no_such_module")
    assert handled == [ModuleNotFoundError] * 2


def fails(*_args, **_kwargs):
    raise OSError("not of the user's code")


def test_an_error_before_the_cell_is_its_result(rank_0, monkeypatch):
    monkeypatch.setattr("unsloth_multigpu.notebook.shell.prompts_answered", fails)
    code = "reached = 1; await asyncio.sleep(0)"
    own = asyncio.run(rank_0.shell.run_cell_async(code, store_history=True, transformed_cell=code))
    for result in (own, rank_0.run("reached = 1")):
        assert isinstance(result.error_before_exec, OSError)
    assert [type(error) for error in rank_0.kernel.finished] == [OSError] * 2
    assert [type(error) for error in rank_0.shown] == [OSError] * 2
    assert rank_0.kernel.cell is None
    assert "reached" not in rank_0.shell.user_ns


def test_an_error_of_ipython_itself_is_the_cells(rank_0, monkeypatch):
    monkeypatch.setattr(rank_0.shell.logger, "log", fails)
    assert isinstance(rank_0.run("1").error_in_exec, OSError)
    assert [type(error) for error in rank_0.kernel.finished] == [OSError]


def test_a_silent_request_is_no_cell_of_all_ranks(rank_0):
    assert rank_0.shell.run_cell("made = 1", store_history=True, silent=True).success
    assert rank_0.shell.user_ns["made"] == 1
    assert rank_0.kernel.states[1:] == []


def test_a_nested_cell_does_not_end_the_cell_of_the_line(rank_0):
    rank_0.steering.close()
    rank_0.shell.user_ns["rank_0"] = rank_0
    rank_0.run("rank_0.steering.open('', 1)\nrank_0.run('2')\nis_running = rank_0.kernel.cell is not None\n")
    assert rank_0.shell.user_ns["is_running"]
    assert (rank_0.kernel.cell, rank_0.kernel.finished) == (None, [None])


def test_a_token_is_told_to_nobody():
    kinds = []

    def make(kind, call, *, is_value):
        kinds.append(kind)
        return call()

    patches = notebook_patches(make)
    (login,) = (patch for patch in patches if patch.target == "huggingface_hub._login:login")
    assert login.wrap(lambda token: f"with {token}", "hf_secret") == "with hf_secret"
    assert kinds == ["login()"]
