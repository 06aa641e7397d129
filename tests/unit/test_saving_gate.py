"""One writer for every file: what rank 0 does, what the others do meanwhile, and what they are told."""

import contextlib
import errno
import functools
import pickle
import subprocess
import sys

import pytest
from torch.distributed import HashStore

from tests.helpers.board import manager_of
from unsloth_multigpu.errors import ConfigError, DistributedError, RankTimeoutError
from unsloth_multigpu.group import saves
from unsloth_multigpu.group.outcome import error_of, failure
from unsloth_multigpu.group.saves import Saves
from unsloth_multigpu.hooks.saving import SaveGate
from unsloth_multigpu.options import MultiGPUConfig

LIMIT_S = 0.2


class Ranks:
    """A gate and a note of the calls that got through, for each rank. Ranks take their turns in one thread."""

    def __init__(self):
        store, config = HashStore(), MultiGPUConfig(timeout_s=LIMIT_S)
        self.managers = [manager_of(store, rank, 2, config) for rank in range(2)]
        for manager in self.managers:
            manager.saves = Saves(manager)
        self.gates = [SaveGate(rank, functools.partial(self.managers.__getitem__, rank)) for rank in range(2)]
        self.calls = [[], []]

    def saver(self, rank, result=None):
        """A saver as a patch leaves it: it notes the call and returns or raises `result`."""

        def save(model, path):
            self.calls[rank].append("save")
            if isinstance(result, BaseException):
                raise result
            return result

        save.__qualname__ = "save"
        return functools.partial(self.gates[rank].once, save)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(saves, "OWN_PATH_GRACE_S", 0.05)
    monkeypatch.setattr(saves, "MEET_LIMIT_S", 0.0)
    return Ranks()


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (("a.json", "b.json"), ["a.json", "b.json"]),
        ((object(),), None),
        ({"gguf_files": ["m.gguf"], "modelfile": None}, {"gguf_files": ["m.gguf"], "modelfile": None}),
        (object(), None),
    ],
)
def test_result_of_rank_0_is_that_of_the_others_where_json_holds_it(ranks, result, told):
    assert ranks.saver(0, result=result)("model", "out") is result
    assert ranks.saver(1)("model", "out") == told
    assert ranks.calls == [["save"], []]


def test_late_rank_is_told_of_the_latest_save_to_the_same_path(ranks):
    for result in ("first", "second"):
        ranks.saver(0, result=result)("model", "out")
    assert ranks.saver(1)("model", "out") == "second"


class Strange(Exception):
    """Cannot be made without its own arguments, by whatever class derives from it."""

    def __new__(cls, code):
        return super().__new__(cls, code)


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out"), OSError),
        (subprocess.CalledProcessError(3, ["x"], "out"), subprocess.CalledProcessError),
        (ConfigError("no", hint="None."), ConfigError),
        (Strange(3), Exception),
        (type("Own", (ZeroDivisionError,), {})("of the script"), ZeroDivisionError),
    ],
)
def test_failure_of_rank_0_is_of_its_class_on_the_others(ranks, error, kinds):
    with pytest.raises(kinds):
        ranks.saver(0, result=error)("model", "out")
    with pytest.raises(kinds, match="rank 0 failed in save") as raised:
        ranks.saver(1)("model", "out")
    told = raised.value
    assert isinstance(told, DistributedError)
    assert told.of_rank_0 == f"{type(error).__name__}: {error}"
    assert type(told).__name__ == "DistributedError"  # In a report the cause is rank 0's.
    for field in ("errno", "returncode"):
        assert getattr(told, field, None) == getattr(error, field, None)


@pytest.mark.parametrize(
    ("module", "name"),
    [("antigravity", "Error"), ("os", "path.join"), ("builtins", "SystemExit"), (__name__, "Ranks.saver")],
)
def test_name_of_a_class_imports_nothing_and_finds_exceptions_only(module, name):
    told = error_of({"error": "x", "kinds": [[module, name]]}, "save")
    assert type(told) is DistributedError
    assert "antigravity" not in sys.modules


def test_token_is_not_published(ranks):
    def init_hf_repo(trainer, token=None):
        if ranks.calls[0]:
            raise ConnectionError("offline")
        ranks.calls[0].append("init")

    published = []
    for manager in ranks.managers:
        manager.publish = lambda *told, publish=manager.publish: published.append(told) or publish(*told)
    for _ in range(2):
        for gate in ranks.gates:
            with contextlib.suppress(ConnectionError):
                gate.learn_of_rank_0(init_hf_repo, "trainer", "hf_secret")
    assert "init_hf_repo" in str(published)
    assert "hf_secret" not in str(published)


def test_save_that_rank_0_never_makes_ends_in_a_timeout(ranks):
    with pytest.raises(RankTimeoutError, match=rf"rank 1 waited {LIMIT_S} seconds for rank 0 in save") as error:
        ranks.saver(1)("model", "out")
    assert "Hint: Save on all ranks" in str(error.value)
    assert ranks.calls == [[], []]


def test_error_of_rank_0_is_pickled_as_plain_one() -> None:
    error = error_of(failure(OSError("full")), "save")
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied)) == (DistributedError, str(error))
