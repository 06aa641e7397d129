"""What becomes of a round when a client, its process, its device or the server ends. One server for many faults."""

from __future__ import annotations

import logging
import os
import signal
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Flower 1.41 needs Python 3.11", allow_module_level=True)

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from tests.helpers.federated import app, arrays, message_to
from tests.helpers.run import ROOT, orphans, start, wait_until
from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.grid import GridOptions, ProcessGrid, SlotDevice
from unsloth_multigpu.launch.process import is_alive

CPU = [SlotDevice("cpu", 0), SlotDevice("cpu", 1)]
GONE = SlotDevice("cuda", 77)  # No machine shows so many.


def facts(reply, name):
    return reply.content["facts"][name]


def pid(reply) -> int:
    return reply.content["metrics"]["pid"]


def warnings(caplog) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "unsloth" in r.name]
    caplog.clear()
    return found


@pytest.fixture
def make_grid(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setenv("MARKER", str(tmp_path / "others"))
    grids = []

    def make(num_clients: int, devices, **options) -> ProcessGrid:
        grids.append(ProcessGrid(app, num_clients, devices, GridOptions(log_dir=str(tmp_path / "logs"), **options)))
        return grids[-1]

    yield make
    for grid in grids:
        grid.close()


@pytest.mark.slow
def test_faults_of_clients_end_no_round(make_grid, caplog, tmp_path):
    grid = make_grid(5, CPU)
    send = grid.send_and_receive

    first = send([message_to(n) for n in range(5)])
    pids = [pid(reply) for reply in first]
    assert pids[0] == pids[2] == pids[4] != pids[1] == pids[3]
    assert [r.metadata.src_node_id for r in first] == [1, 2, 3, 4, 5]
    assert [r.content["arrays"]["w"].numpy().tolist() for r in first] == [[n] * 4 for n in range(5)]
    assert {facts(r, "CUDA_VISIBLE_DEVICES") for r in first} == {""}
    assert {facts(r, "RANK") for r in first} == {"-"}
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {(facts(r, "OMP_NUM_THREADS"), facts(r, "threads")) for r in first} == {(str(threads), threads)}
    records = grid.take_records()
    assert [(r.client_id, r.slot, r.device) for r in records] == [(n, n % 2, f"cpu:{n % 2}") for n in range(5)]
    assert all(r.peak_memory_bytes > 2**26 and r.sent_bytes > 0 and r.received_bytes > 0 for r in records)
    assert warnings(caplog) == []

    # An exception; sys.exit(); a reply larger than any buffer; one that is none. The processes are still the same.
    what = [message_to(0, "fail"), message_to(1, "leave"), message_to(2, "large"), message_to(3, kind="query")]
    failed, left, large, none = send([*what, message_to(4)])[:4]
    assert failed.error.code == left.error.code == none.error.code == 2
    assert failed.error.reason == "client 0 (round 1, train) on slot 0, cpu:0: ValueError: no data for me"
    assert left.error.reason.endswith("SystemExit: 3")
    assert none.error.reason.endswith("the ClientApp returned NoneType, expected flwr.app.Message")
    assert large.content["arrays"]["w"].numpy().nbytes == 4 * 10**7
    assert pid(large) == pids[0]
    told = warnings(caplog)
    assert len(told) == 3
    assert sum("ValueError: no data\nfor me" in text and "in fail" in text for text in told) == 1
    assert grid.client_states()[2]["calls"]["n"] == 2

    # Killed once: run once more, on the other device, by number and name; killed again and again: left out.
    grid.take_records()
    messages = [message_to(0, "kill_once", marker=str(tmp_path / "a")), message_to(1, "kill"), message_to(2)]
    again, out, fine = send(messages)
    assert again.has_content()
    assert fine.has_content()
    assert out.error.code == 8
    assert "was ended by SIGKILL" in out.error.reason
    assert [(r.client_id, r.attempts) for r in grid.take_records()] == [(0, 2), (1, 2), (2, 1)]
    told = "\n".join(warnings(caplog))
    assert "in the middle of client 0 (round 1, train) on slot 0, cpu:0, which is run once more" in told
    assert "client 1 (round 1, train) on slot" in told
    assert "about to end" in told  # From the log.

    # Killed with half of the reply sent; its device lost.
    half = message_to(0, "kill_while_sending_once", marker=str(tmp_path / "b"))
    lost = message_to(1, "lose_device_once", marker=str(tmp_path / "c"))
    assert [r.has_content() for r in send([half, lost])] == [True, True]
    assert [r.attempts for r in grid.take_records()] == [2, 2]
    assert "because its device failed: RuntimeError: CUDA error: unspecified launch failure" in "".join(
        warnings(caplog)
    )

    # Killed while it waits.
    alive = [pid(r) for r in send([message_to(0), message_to(1)])]
    os.kill(alive[0], signal.SIGKILL)
    wait_until(lambda: not is_alive(alive[0]), 10.0, "its end")
    now = [pid(r) for r in send([message_to(0), message_to(1)])]
    assert now[0] != alive[0]
    assert now[1] == alive[1]
    assert "while it waited" in "".join(warnings(caplog))

    # The round's limit: what hangs is ended, and where it was is told; what waits is not begun; the next is whole.
    hung, waits, fine = send([message_to(0, "hang"), message_to(2), message_to(1)], timeout=1.0)
    assert fine.has_content()
    assert "not ended by the round's limit, it was in federated.py:" in hung.error.reason
    assert "in hang" in hung.error.reason
    assert waits.error.reason == "client 2 (round 1, train): not begun by the round's limit"
    assert 1.0 <= grid.round_seconds < 4.0
    assert [r.slot for r in grid.take_records()[-3:]] == [0, -1, 1]
    assert [r.has_content() for r in send([message_to(0, "start_others"), message_to(1)])] == [True, True]

    # Ctrl-C.
    def interrupt() -> None:
        wait_until((tmp_path / "d").exists, 60.0, "a client that hangs")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        send([message_to(0, "hang", marker=str(tmp_path / "d")), message_to(1)])
    thread.join()
    assert orphans(str(tmp_path / "others")) == []
    assert not Path(f"/proc/{(tmp_path / 'd').read_text()}").exists()
    grid.new_clients(3)
    assert grid.get_node_ids() == [1, 2, 3]
    assert grid.client_states() == {}
    ids = grid.push_messages([message_to(2, "start_others")])
    replies = []
    wait_until(lambda: replies.extend(grid.pull_messages(ids)) or replies, 60.0, "a reply")
    assert replies[0].content["metrics"]["calls"] == 0
    assert grid.pull_messages(ids) == []

    log = grid.log_dir / "slot_0.log"
    assert "client 2 prints" in log.read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in grid.log_dir.glob("slot_*.log")} == {0o600}
    grid.close()
    assert orphans(str(tmp_path / "others")) == []
    assert TaskIdentity._run_id is None
    with pytest.raises(FederatedError, match="closed"):
        send([])


@pytest.mark.slow
def test_device_that_vanishes_leaves_its_clients_to_the_others(make_grid, caplog, tmp_path):
    grid = make_grid(4, [SlotDevice("cpu", 0), GONE], clients_per_gpu="auto")
    replies = grid.send_and_receive([message_to(n) for n in range(4)])
    assert all(reply.has_content() for reply in replies)
    assert {r.device for r in grid.take_records()} == {"cpu:0"}
    told = warnings(caplog)
    assert "was killed, because DeviceError: this slot sees 0" in told[0]
    assert "It was not ready yet; it is started once more" in told[0]
    assert "It is not started a third time: its clients go to other slots" in told[1]
    assert "this slot sees 0 cuda devices; expected 1" in told[1]
    # One client has shown what it needs: more at once fit.
    most = min(4, len(os.sched_getaffinity(0)))
    assert grid.devices_of_slots.count("cpu:0") == most

    # They are too many for another one: it is run once more, beside fewer.
    (reply,) = grid.send_and_receive([message_to(0, "run_out_of_memory_once", marker=str(tmp_path / "a"))])
    assert reply.has_content()
    assert "ran out of memory beside others; it is run once more" in warnings(caplog)[-1]
    grid.take_records()
    grid.send_and_receive([message_to(n) for n in range(4)])
    assert len({r.slot for r in grid.take_records()}) <= most - 1

    # By Flower's own strategy, the example-weighted mean of what is left.
    echo = ConfigRecord({"do": "echo"})
    result = FedAvg(fraction_evaluate=0.0).start(grid, arrays(np.zeros(4)), num_rounds=1, train_config=echo)
    assert result.arrays["w"].numpy().tolist() == [pytest.approx((0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10)] * 4
    grid.close()

    alone = make_grid(1, [GONE])
    with pytest.raises(FederatedError, match=r"(?s)No slot is left: slot 0 on cuda:77 .*this slot sees 0 cuda devices"):
        alone.send_and_receive([message_to(0)])


SERVER = """
import os
import time
from flwr.clientapp import ClientApp
from tests.helpers.federated import message_to, train
from unsloth_multigpu.federated.grid import GridOptions, ProcessGrid, SlotDevice

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

grid = ProcessGrid(app, 2, [SlotDevice("cpu", 0), SlotDevice("cpu", 1)], GridOptions())
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


@pytest.mark.slow
def test_server_that_is_killed_leaves_nothing(tmp_path):
    script, marker = tmp_path / "server.py", tmp_path / "others"
    script.write_text(SERVER)
    server = start([script], tmp_path, {"PYTHONPATH": str(ROOT), "MARKER": str(marker)})
    try:
        # A function of the script finds its globals, and the process keeps them.
        assert [server.stdout.readline() for _ in range(2)] == ["1\n", "2\n"], server.stderr.read()
        child = int(server.stdout.readline())
        wait_until(lambda: marker.exists() and marker.read_text(), 60.0, "a client that hangs")
        slot = int(marker.read_text())
        group = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and group_of(p) == slot]
        assert len(group) == 3  # The slot, a DataLoader's worker, a program.
        server.kill()
        server.wait()
        wait_until(lambda: not any(map(is_alive, group)), 10.0, "the end of a slot")
        wait_until(lambda: started_in(tmp_path) == [child], 10.0, "the end of the other slot")
    finally:
        for pid in started_in(tmp_path):
            os.kill(pid, signal.SIGKILL)
        server.communicate()


def started_in(folder: Path) -> list[int]:
    """Living processes that run there."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and os.readlink(process / "cwd") == str(folder) and is_alive(int(process.name)):
                found.append(int(process.name))
    return found


def group_of(process: Path) -> int:
    try:
        return os.getpgid(int(process.name))
    except ProcessLookupError:
        return 0
