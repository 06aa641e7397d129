"""A signal that ends a process which waits for a command ends the command, too."""

import os
import signal

import pytest

from tests.helpers.run import finish, start, wait_until
from unsloth_multigpu.wire.child import find_marked

ASKS = """
import os, sys
from unsloth_multigpu.shard.script_probe import Question, ask
question = Question((("ddp", 1),))
ask([sys.executable, "-c", "import time; open('begun', 'w').close(); time.sleep(600)"], os.environ, question)
"""


@pytest.fixture(autouse=True)
def terminal():
    """SIGHUP ends a process, also where the tests were started under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_script_that_is_asked_ends_with_who_asks_it(tmp_path):
    (tmp_path / "tmp").mkdir()
    with start(["-c", ASKS], tmp_path, {"TMPDIR": str(tmp_path / "tmp")}) as asking:
        wait_until((tmp_path / "begun").exists, 60.0, "the script that is asked")
        asking.send_signal(signal.SIGHUP)
        ended = finish(asking)
    left = find_marked(str(tmp_path / "tmp"))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (ended.code, left) == (128 + signal.SIGHUP, []), ended.err
    assert list((tmp_path / "tmp").iterdir()) == []
