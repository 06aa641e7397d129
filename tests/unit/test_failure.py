"""What is shown of an error: the user's frames, and all of them where this package is at fault."""

import time

import pytest

from unsloth_multigpu.launch.rank import shown_error
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase
from unsloth_multigpu.wire.wait import wait_until


def shown(function):
    try:
        function()
    except Exception as error:
        return "".join(shown_error(type(error), error, error.__traceback__).format())
    pytest.fail("no error")


def users_mistake():
    return bool({}["text"])


def test_frames_between_two_of_the_user_are_left_out():
    text = shown(lambda: wait_until(users_mistake, time.monotonic()))
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
