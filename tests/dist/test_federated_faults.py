"""What becomes of a round when a client, its process, its device or the server ends. One server for many faults."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Flower 1.41 needs Python 3.11", allow_module_level=True)

import torch
from flwr.supercore.task_identity import TaskIdentity

from tests.helpers.federated import app, message_to
from tests.helpers.run import ROOT, orphans, start, wait_until
from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.grid import ProcessGrid, task_identity
from unsloth_multigpu.wire.child import find_marked
from unsloth_multigpu.wire.process import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

CPU = [torch.device("cpu", 0), torch.device("cpu", 1)]


def facts(reply, name):
    return reply.content["facts"][name]


def pid(reply) -> int:
    return reply.content["metrics"]["pid"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("OMP_NUM_THREADS", "")
        patch.setenv("PYTHONIOENCODING", "ascii")  # As a slot's streams are where no locale is set.
        patch.setenv("MARKER", str(path / "others"))
        yield path


@pytest.fixture(scope="module")
def rounds(folder):
    """One grid of five clients on two slots: each fault meets the processes that the one before has left.

    Of each `send_and_receive` there are each message's reply and record, what was told of it, and how long it took.
    """
    found, told, handler = {}, [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("unsloth_multigpu").addHandler(handler)
    with task_identity(), closing(ProcessGrid(app, 5, CPU, log_dir=str(folder / "logs"))) as grid:

        def send(name, *messages, **options):
            begin_s = time.monotonic()
            told.clear()
            replies = grid.send_and_receive(messages, **options)
            facts = {"replies": replies, "records": grid.records, "told": "\n".join(told)}
            found[name], grid.records = SimpleNamespace(**facts, seconds=time.monotonic() - begin_s), []
            return replies

        send("whole", *map(message_to, range(5)))
        raising = map(message_to, range(3), ("fail", "leave", "large"))
        send("raised", *raising, message_to(3, kind="query"), message_to(4))
        killed = [message_to(0, "kill_once", marker=str(folder / "a")), message_to(1, "kill"), message_to(2)]
        send("killed", *killed)
        lost = send("lost", message_to(0), message_to(1, "lose_device_once", marker=str(folder / "c")))
        os.kill(pid(lost[0]), signal.SIGKILL)
        # All of its threads: the first one may have ended long before.
        wait_until(grid.slots[0]._process.has_ended, 60, "its end")
        send("replaced", message_to(0), message_to(1))
        send("late", message_to(0, "hang"), message_to(2), message_to(1), timeout=2.0)
        shutil.rmtree(folder / "logs")
        send("without_logs", message_to(0, "start_others"), message_to(1))
        found["interrupted"] = interrupt(grid, message_to(0, "hang", marker=str(folder / "d")), folder / "d")
        found["orphans"] = [*orphans(str(folder / "others")), *filter(is_alive, [int((folder / "d").read_text())])]
        grid.num_clients = 3
        found["new"] = grid.get_node_ids()
        send("new_clients", message_to(2, "start_others"))
    logs = folder / "logs"
    found["log"] = (logs / "slot_0.log").read_text(encoding="utf-8")
    found["modes"] = {stat.S_IMODE(path.stat().st_mode) for path in logs.glob("slot_*.log")}
    logging.getLogger("unsloth_multigpu").removeHandler(handler)
    found["orphans"] += orphans(str(folder / "others"))
    found["grid"] = grid
    return found


def interrupt(grid, message, marker: Path) -> bool:
    """Ctrl-C while the client hangs."""

    def press() -> None:
        wait_until(lambda: marker.exists() and marker.read_text(), 60.0, "a client that hangs")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        grid.send_and_receive([message, message_to(1)])
    except KeyboardInterrupt:
        return True
    finally:
        thread.join()
    return False


def test_clients_run_in_processes_of_their_own(rounds):
    whole = rounds["whole"]
    pids = [pid(reply) for reply in whole.replies]
    assert pids[0] == pids[2] == pids[4] != pids[1] == pids[3]
    assert [r.metadata.src_node_id for r in whole.replies] == [1, 2, 3, 4, 5]
    assert [r.content["arrays"]["w"].numpy().tolist() for r in whole.replies] == [[n] * 4 for n in range(5)]
    assert {facts(r, "CUDA_VISIBLE_DEVICES") for r in whole.replies} == {""}
    assert {facts(r, "RANK") for r in whole.replies} == {"-"}
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {(facts(r, "OMP_NUM_THREADS"), facts(r, "threads")) for r in whole.replies} == {(str(threads), threads)}
    assert [(r.client_id, r.slot, r.device) for r in whole.records] == [(n, n % 2, f"cpu:{n % 2}") for n in range(5)]
    assert whole.told == ""


def test_client_that_raises_is_left_out_by_name(rounds):
    """An exception; sys.exit(); a reply larger than any buffer; one that is none. The processes are still the same."""
    failed, left, large, none, _ = rounds["raised"].replies
    assert failed.error.code == left.error.code == none.error.code == 2
    assert failed.error.reason == "client 0 (round 1, train) on slot 0, cpu:0: ValueError: no data for me"
    assert left.error.reason.endswith("SystemExit: 3")
    assert none.error.reason.endswith("the ClientApp returned NoneType, expected flwr.app.Message")
    assert large.content["arrays"]["w"].numpy().nbytes == 4 * 10**7
    assert pid(large) == pid(rounds["whole"].replies[0])
    told = rounds["raised"].told
    assert told.count("failed:") == 3
    assert told.count("ValueError: no data\nfor me") == 1
    assert "in fail" in told


def test_client_whose_process_is_killed_runs_once_more(rounds):
    """Killed once: by number and name; killed again and again: left out."""
    again, out, fine = rounds["killed"].replies
    assert again.has_content()
    assert fine.has_content()
    assert out.error.code == 8
    assert "was ended by SIGKILL" in out.error.reason
    assert [(r.client_id, r.attempts) for r in rounds["killed"].records] == [(0, 2), (1, 2), (2, 1)]
    told = rounds["killed"].told
    assert "It was running client 0 (round 1, train) on slot 0, cpu:0, which is run once more" in told
    assert "client 1 (round 1, train) on slot" in told
    assert "about to end" in told  # From the log.


def test_client_of_a_lost_device_is_run_once_more(rounds):
    assert [r.has_content() for r in rounds["lost"].replies] == [True, True]
    assert [r.attempts for r in rounds["lost"].records] == [1, 2]
    assert "because its device failed: RuntimeError: CUDA error: unspecified launch failure" in rounds["lost"].told


def test_process_that_is_killed_while_it_waits_is_replaced(rounds):
    before, now = ([pid(r) for r in rounds[name].replies] for name in ("lost", "replaced"))
    assert now[0] != before[0]
    assert now[1] == before[1]
    assert f"slot 0 on cpu:0 (pid {before[0]}) was ended by SIGKILL" in rounds["replaced"].told


def test_limit_of_a_round_ends_what_hangs(rounds):
    late = rounds["late"]
    hung, waits, fine = late.replies
    assert fine.has_content()
    assert "not finished within round_timeout_s" in hung.error.reason
    assert waits.error.reason == "client 2 (round 1, train): not started within round_timeout_s"
    assert 2.0 <= late.seconds < 30.0
    assert [r.slot for r in late.records] == [0, -1, 1]


def test_removed_logs_end_nothing(rounds):
    """The slot that hung has to start again, where its log was."""
    assert [r.has_content() for r in rounds["without_logs"].replies] == [True, True]
    assert "client 2 prints \u00e4" in rounds["log"]
    assert rounds["modes"] == {0o600}


def test_nothing_is_left_of_a_round_that_was_interrupted_or_of_a_grid(rounds):
    assert rounds["interrupted"]
    assert rounds["orphans"] == []
    assert rounds["new"] == [1, 2, 3]
    (reply,) = rounds["new_clients"].replies
    assert reply.has_content()
    assert TaskIdentity._run_id is None
    with pytest.raises(FederatedError, match="closed"):
        rounds["grid"].send_and_receive([])


SERVER = """
import os
import time
import torch
from flwr.clientapp import ClientApp
from tests.helpers.federated import message_to, train
from unsloth_multigpu.federated.grid import ProcessGrid, task_identity

CALLS = 0
app = ClientApp()

def count():
    global CALLS
    CALLS += 1

@app.train()
def own(message, context):
    count()
    if message.content["config"]["do"] == "echo":
        reply = train(message, context)
        reply.content["metrics"]["calls"] = CALLS
        return reply
    return train(message, context)

identity = task_identity()
identity.__enter__()
grid = ProcessGrid(app, 2, [torch.device("cpu", 0), torch.device("cpu", 1)])
print(grid.send_and_receive([message_to(0)])[0].content["metrics"]["calls"], flush=True)
print(grid.send_and_receive([message_to(0)])[0].content["metrics"]["calls"], flush=True)
# A child of the server, as its DataLoader would have, which outlives it and has what it had open.
child = os.fork()
if child == 0:
    time.sleep(100)
    os._exit(0)
print(child, flush=True)
grid.send_and_receive([message_to(0, "start_others_and_hang"), message_to(1, "hang")])
"""


def test_server_that_is_killed_leaves_nothing(tmp_path):
    script, marker = tmp_path / "server.py", tmp_path / "others"
    script.write_text(SERVER)
    server = start([script], tmp_path, {"PYTHONPATH": str(ROOT), "MARKER": str(marker)})
    try:
        # A function of the script finds its globals, and the process keeps them.
        assert [server.stdout.readline() for _ in range(2)] == ["1\n", "2\n"], server.stderr.read()
        child = int(server.stdout.readline())
        wait_until(lambda: marker.exists() and marker.read_text(), 60.0, "a client that hangs")
        # The server, its child, two slots, a DataLoader's worker, a program.
        assert len(find_marked(str(marker))) == 6
        server.kill()
        server.wait()
        wait_until(lambda: find_marked(str(marker)) == [child], 60, "the end of the slots")
    finally:
        for pid in find_marked(str(marker)):
            os.kill(pid, signal.SIGKILL)
        server.communicate()
