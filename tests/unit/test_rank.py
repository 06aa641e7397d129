"""What a rank logs, shows of an error, tells its supervisor, and asks: a question is asked once, on rank 0."""

import builtins
import logging
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.launch.question import questions_shared
from unsloth_multigpu.launch.rank import last_collective, shown_error
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire import wait
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.stack import main_frames, place_of


def shown(function):
    try:
        function()
    except Exception as error:
        return "".join(shown_error(type(error), error, error.__traceback__).format())
    pytest.fail("no error")


def users_mistake():
    return bool({}["text"])


def test_frames_between_two_of_the_user_are_left_out():
    text = shown(lambda: wait.wait_until(users_mistake, time.monotonic()))
    assert "users_mistake" in text
    assert "unsloth_multigpu/wire/wait.py" not in text
    assert text.endswith("KeyError: 'text'\n")


def test_option_that_cannot_be_used_shows_the_users_line_alone():
    text = shown(lambda: MultiGPUConfig(num_gpus="two"))
    assert "lambda: MultiGPUConfig" in text
    assert "unsloth_multigpu/" not in text
    assert "<string>" not in text


def test_defect_of_this_package_keeps_all_frames():
    text = shown(lambda: HeartbeatPage(None, 0).mark(Phase.DATA, step="one"))
    assert "unsloth_multigpu/wire/heartbeat.py" in text


TEXT = """Thread 0x00007f0000000001 [pulse] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/train.py", line 1 in other

Current thread 0x00007f0000000000 [python] (most recent call first):
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "{threading}", line 327 in wait
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/linear.py", line 134 in forward
  File "{package}", line 5 in run
  File "/home/me/my "model".py", line 41 in forward
  File "/home/me/train.py", line 90 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3"
"""


def test_innermost_line_of_the_users_own_is_named():
    frames = main_frames(TEXT.format(threading=threading.__file__, package=wait.__file__))
    assert len(frames) == 6
    assert place_of(frames) == 'my "model".py:41 in forward'
    assert place_of(frames[:4]) == ""
    assert place_of(['  File "<ipython-input-4-829d36eb45d5>", line 7 in collate']) == "In [4]:7 in collate"
    assert (main_frames(""), main_frames("Segmentation fault\n")) == ([], [])


def test_group_that_is_being_closed_is_no_error(monkeypatch):
    assert last_collective() == -1
    broken = SimpleNamespace(is_initialized=lambda: True, _get_default_group=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", broken)
    assert last_collective() == -1


@pytest.mark.parametrize(
    ("raised", "seen"), [(KeyboardInterrupt(), DistributedError), (EOFError("x"), EOFError), (OSError("x"), OSError)]
)
def test_error_at_the_prompt_reaches_the_other_rank(tmp_path, monkeypatch, raised, seen):
    once = [raised]

    def ask(_):
        raise once.pop()

    monkeypatch.setattr(builtins, "input", ask)
    for rank, kind in enumerate((type(raised), seen)):
        identity, page = RankIdentity(rank, rank, 2, 2, "unsloth_multigpu"), HeartbeatPage(None, rank)
        with questions_shared(tmp_path, identity, 0, page), pytest.raises(kind):
            input("? ")


@pytest.mark.parametrize(
    ("level", "of_another"),
    [
        (logging.DEBUG, []),
        (logging.INFO, []),
        *((level, ["[rank 3] loss=1.5 share=50%"]) for level in (logging.WARNING, logging.ERROR, logging.CRITICAL)),
    ],
)
def test_rank_0_says_everything_and_others_warn_with_their_number(monkeypatch, caplog, level, of_another):
    for rank, shown in (("0", ["loss=1.5 share=50%"]), ("3", of_another)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        logger = get_logger(f"stub_logger_{rank}_{level}")
        logger.setLevel(logging.DEBUG)
        caplog.clear()
        logger.log(level, "loss=%s share=50%%", 1.5)
        assert caplog.messages == shown
