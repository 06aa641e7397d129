"""The processes of ranks, and of a script that is asked: who has the terminal, and what ends with whom."""

import os
import signal
import sys

import pytest

from tests.helpers.run import finish, start, wait_until
from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.launch.watch import start_ranks
from unsloth_multigpu.wire.child import find_marked
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import is_alive

FIRST = RankIdentity(4, 0, 8, 2, "unsloth_multigpu", "10.0.0.1", 29500)
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def begin(script, folder):
    return start_ranks([sys.executable, "-c", script], FIRST, {**os.environ, "HERE": str(folder)}, folder)


def test_ranks_know_their_place_and_only_the_first_has_the_terminal(tmp_path, capfd):
    facts = "os.getsid(0) == os.getpid(), os.readlink('/proc/self/fd/0') == '/dev/null'"
    script = f"import os\nprint(*[os.environ[n] for n in {NAMES}], {facts})"
    with begin(script, tmp_path) as ranks:
        wait_until(lambda: not ranks.living(), 60, "end of the ranks")
        assert ranks.exit_codes == {4: 0, 5: 0}
    assert capfd.readouterr().out.startswith("4 0 8 2 10.0.0.1 29500 True ")
    assert (tmp_path / "rank_5.log").read_text() == "5 1 8 2 10.0.0.1 29500 True True\n"
    assert (tmp_path / "rank_5.log").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "rank_4.log").exists()


CHILD = """
import os, signal, subprocess, time
if os.environ["RANK"] == "5":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "100"])
with open(os.environ["HERE"] + "/child_" + os.environ["RANK"], "w") as file:
    file.write(str(child.pid) + "\\n")
time.sleep(100)
"""


def test_signals_reach_what_a_rank_has_started_and_nothing_is_left_behind(tmp_path):
    files = [tmp_path / f"child_{rank}" for rank in (4, 5)]
    with begin(CHILD, tmp_path) as ranks:
        wait_until(lambda: all(f.exists() and f.read_text().endswith("\n") for f in files), 60, "children")
        pids = [int(file.read_text()) for file in files]
        ranks.send(signal.SIGTERM)
        wait_until(lambda: ranks.exit_codes or not ranks.living(), 60, "end of the first")
        wait_until(lambda: not is_alive(pids[0]), 60, "end of its child")
        assert (ranks.exit_codes, list(ranks.living())) == ({4: -signal.SIGTERM}, [5])
        deaf = ranks.living()[5]
    assert not is_alive(deaf)
    # It was killed with its rank, and nobody here collects it.
    wait_until(lambda: not is_alive(pids[1]), 60, "end of the child of the deaf one")


def test_link_in_the_place_of_a_log_is_not_followed_and_no_rank_is_left(tmp_path):
    victim = tmp_path / "victim"
    (tmp_path / "rank_5.log").symlink_to(victim)
    with pytest.raises(LaunchError, match=r"rank 5 could not be started: .*symbolic link"):
        begin("import time; time.sleep(100)", tmp_path)
    assert not victim.exists()
    assert find_marked(f"HERE={tmp_path}") == []


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
