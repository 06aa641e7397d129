"""Devices, packing, slots and frames of a federated server: without a process, or with a fake one."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import socket
import sys
import threading
import weakref
from contextlib import ExitStack

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Flower 1.41 needs Python 3.11", allow_module_level=True)

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from tests.helpers.run import ROOT, run_python
from unsloth_multigpu.errors import FederatedError, SetupError, VersionError
from unsloth_multigpu.federated import device, pool, worker
from unsloth_multigpu.federated.device import SlotDevice, choose_devices, slot_environment
from unsloth_multigpu.federated.grid import ProcessGrid, pack, task_identity
from unsloth_multigpu.federated.report import ClientRecord
from unsloth_multigpu.federated.slot import Slot, Task
from unsloth_multigpu.federated.worker import Outcome
from unsloth_multigpu.wire.frames import Frames
from unsloth_multigpu.wire.process import is_alive

ONE, TWO = SlotDevice("cuda", 0), SlotDevice("cuda", 1)


@pytest.mark.parametrize(
    ("index", "inherited", "shown"),
    [
        (1, {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (1, {"CUDA_VISIBLE_DEVICES": "5, GPU-abc"}, {"CUDA_VISIBLE_DEVICES": "GPU-abc"}),
        (0, {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, {"CUDA_VISIBLE_DEVICES": "MIG-1"}),
        (1, {"HIP_VISIBLE_DEVICES": "3,2"}, {"HIP_VISIBLE_DEVICES": "2"}),
    ],
)
def test_slot_sees_the_entry_of_its_device(index, inherited, shown):
    told = slot_environment(SlotDevice("cuda", index), 2, 0, inherited)
    assert {name: value for name, value in told.items() if "VISIBLE" in name} == shown


def test_slot_of_another_vendor_has_its_mask():
    assert slot_environment(SlotDevice("xpu", 1), 2, 0, {"ZE_AFFINITY_MASK": "2,3"})["ZE_AFFINITY_MASK"] == "3"


def test_device_that_the_environment_does_not_show_is_an_error():
    with pytest.raises(SetupError, match="cuda:1 is to be used, but CUDA_VISIBLE_DEVICES='3'"):
        slot_environment(TWO, 2, 0, {"CUDA_VISIBLE_DEVICES": "3"})


def test_slot_knows_nothing_of_ranks_and_keeps_what_the_user_has_set():
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "OMPI_COMM_WORLD_SIZE": "2"}
    ours = {"UNSLOTH_MULTIGPU_RUN_DIR": "/x", "GROUP_WORLD_SIZE": "1"}
    users = {"HF_HOME": "/h", "OMP_NUM_THREADS": "3", "PYTHONHASHSEED": "9", "CUDA_VISIBLE_DEVICES": "0,1"}
    seen = slot_environment(SlotDevice("cpu", 0), 2, 7, {**told, **ours, **users})
    assert seen == {
        "HF_HOME": "/h",
        "OMP_NUM_THREADS": "3",
        "PYTHONHASHSEED": "9",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "ONEAPI_DEVICE_SELECTOR": "*:cpu",
        "ACCELERATE_USE_CPU": "true",
    }


def test_slots_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    threads = [slot_environment(ONE, n, 5, {"OMP_NUM_THREADS": ""})["OMP_NUM_THREADS"] for n in (1, 3, 20)]
    assert threads == ["8", "2", "1"]
    assert slot_environment(ONE, 1, 5, {})["PYTHONHASHSEED"] == "5"


@pytest.mark.parametrize(
    ("visible", "asked", "chosen"),
    [
        (("cuda", 2), {"num_gpus": None}, "cuda:0 cuda:1"),
        (("cuda", 4), {"num_gpus": 2}, "cuda:0 cuda:1"),
        (("cpu", 0), {"num_gpus": None}, "cpu:0"),
        (("cpu", 0), {"num_gpus": 2}, "cpu:0 cpu:1"),
        (("xpu", 2), {"num_gpus": None}, "xpu:0 xpu:1"),
        (("cuda", 2), {"num_gpus": None, "device": "cuda:1", "auto_gpu": False}, "cuda:1"),
        (("cuda", 2), {"num_gpus": None, "device": "cpu", "auto_gpu": False}, "cpu:0"),
        (("cuda", 2), {"num_gpus": None, "auto_gpu": False}, "cuda:0"),
        (("cpu", 0), {"num_gpus": None, "auto_gpu": False}, "cpu:0"),
    ],
)
def test_devices_are_those_that_were_asked_for(monkeypatch, visible, asked, chosen):
    monkeypatch.setattr(device, "visible_accelerators", lambda: visible)
    assert " ".join(map(str, choose_devices(**asked))) == chosen


@pytest.mark.parametrize(
    ("visible", "asked", "message"),
    [
        (("cuda", 2), {"num_gpus": 3}, r"cuda:2 is to be used, but 2 cuda device\(s\) are visible"),
        (("cuda", 2), {"num_gpus": 1, "auto_gpu": False}, "auto_gpu=False, but num_gpus=1"),
        (("cuda", 2), {"num_gpus": None, "device": "cuda:2", "auto_gpu": False}, r"cuda:2 is to be used, but 2"),
        (("cpu", 0), {"num_gpus": None, "device": "cuda", "auto_gpu": False}, r"cuda:0 is to be used, but 0"),
    ],
)
def test_devices_that_are_not_there_are_an_error(monkeypatch, visible, asked, message):
    monkeypatch.setattr(device, "visible_accelerators", lambda: visible)
    with pytest.raises(SetupError, match=message):
        choose_devices(**asked)


def test_devices_are_counted_without_opening_one():
    import torch

    choose_devices(None)
    assert not torch.cuda.is_initialized()


def test_object_that_cannot_travel_is_an_error_before_anything_starts():
    lock = threading.Lock()
    with pytest.raises(SetupError, match=r"cannot be sent to a slot: cannot pickle '_thread.lock' object"):
        pack(lambda: lock)


def test_functions_that_travel_share_their_globals():
    source = "count = 0\ndef step():\n    global count\n    count += 1\ndef read():\n    return count"
    names = {"__name__": "__main__"}
    exec(source, names)
    step, read = pickle.loads(pack([names["step"], names["read"]]))
    step()
    assert (read(), names["count"]) == (1, 0)


def test_outcome_holds_what_a_client_raises_and_lets_ctrl_c_go_on():
    outcome = Outcome()
    with outcome:
        raise ValueError("no\ndata")
    assert str(outcome) == "ValueError: no data"
    with pytest.raises(KeyboardInterrupt), outcome:
        raise KeyboardInterrupt


def test_codes_are_those_of_flower():
    assert pool.REPLY_UNAVAILABLE == ErrorCode.REPLY_MESSAGE_UNAVAILABLE
    assert pool.CLIENT_RAISED == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert pool.CLIENT_CRASHED == ErrorCode.CLIENT_APP_CRASHED


@pytest.fixture(autouse=True)
def identity():
    with task_identity(77):
        yield


def make_task(client_id: int, kind: str = "train") -> Task:
    context = Context(run_id=1, node_id=client_id + 1, node_config={}, state=RecordDict(), run_config={})
    return Task(Message(RecordDict(), client_id + 1, kind), context, ClientRecord(client_id, kind))


def test_error_reply_names_client_round_and_slot():
    failed = make_task(3)
    failed.record.slot, failed.record.device, failed.record.attempts = 1, "cuda:1", 1
    assert failed.fail(2, "ValueError: no") == "client 3 (round 0, train) on slot 1, cuda:1: ValueError: no"
    assert failed.reply.error.reason == failed.record.error


def test_identity_is_given_back_and_other_versions_of_flower_are_an_error(monkeypatch):
    with task_identity(5):
        assert TaskIdentity.run_id == 5
    assert TaskIdentity.run_id == 77
    with monkeypatch.context() as patch:
        patch.delattr(TaskIdentity, "_node_id")
        with pytest.raises(VersionError, match=r"TaskIdentity is not that of 1.41: .*_node_id"):
            task_identity(5).__enter__()
    monkeypatch.setitem(sys.modules, "flwr.supercore.task_identity", None)
    with pytest.raises(VersionError, match=r"TaskIdentity is not that of 1.41: "):
        task_identity(5).__enter__()


def test_grid_has_flowers_two_calls_that_strategies_need(make_grid):
    grid = make_grid(2, [ONE, TWO])
    assert grid.devices_of_slots == ["cuda:0", "cuda:1"]
    assert grid.get_node_ids() == [1, 2]
    assert grid.send_and_receive([]) == []
    with pytest.raises(FederatedError, match="Slots have no such call"):
        grid.push_messages([])


def test_grid_that_nobody_closes_ends_without_a_word(tmp_path):
    program = (
        "from unsloth_multigpu.federated.grid import *\n"
        "grid = ProcessGrid(None, 1, [SlotDevice('cpu', 0)])\n"
        "grid.pool._feed()\n"
        "print(grid.pool.slots[0].pid)"
    )
    ended = run_python(["-c", program], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert (ended.code, ended.err) == (0, "")
    assert not is_alive(int(ended.out))


class FakeProcess:
    """In place of a slot's process: answers over the slot's frames, when and as the test says."""

    says: tuple | None = ("ready",)
    is_killed = False

    def __init__(self, name, program, log, environment, arguments):
        self.name, self.pid = name, 1
        self.connection, theirs = socket.socketpair()
        self._frames = Frames(theirs, 5.0)
        # Readable when the other end is closed, as a descriptor of a process that has ended.
        self.pid_descriptor, self._life = os.pipe()
        self._has_ended = False
        if self.says:
            self.say(*self.says)

    def say(self, *fields):
        self._frames.send(pickle.dumps(fields))

    def die(self):
        if not self._has_ended:
            self._has_ended = True
            self._frames.close()
            os.close(self._life)

    collect = die

    def kill(self, because):
        self.is_killed = True
        self.die()

    def is_mine(self):
        return True

    def has_ended(self, limit_s=0.0):
        return self._has_ended

    def describe_end(self):
        return f"{self.name} has ended"


@pytest.fixture
def processes(monkeypatch):
    """Slot number -> its newest process."""
    found = {}

    def start(name, *arguments):
        number = int(name.split()[1])
        found[number] = FakeProcess(name, *arguments)
        return found[number]

    monkeypatch.setattr("unsloth_multigpu.federated.slot.Child", start)
    return found


@pytest.fixture
def make_grid(tmp_path, processes):
    """A grid whose slots are fake processes."""
    with ExitStack() as grids:

        def make(num_clients, devices, **options):
            grid = ProcessGrid(None, num_clients, devices, log_dir=str(tmp_path / "logs"), **options)
            grids.callback(grid.close)
            return grid

        yield make


def step(grid):
    grid.pool._feed()
    grid.pool._listen(0.0)
    grid.pool._feed()


def submit(grid, *client_ids):
    """Lets clients wait, and those begin that find a slot."""
    tasks = [make_task(n) for n in client_ids]
    grid.pool._waiting += tasks
    step(grid)
    return tasks


def client_of(grid, number):
    task = grid.pool.slots[number].task
    return None if task is None else task.record.client_id


def test_slot_that_does_not_become_ready_is_started_again(make_grid, monkeypatch):
    monkeypatch.setattr(FakeProcess, "says", None)
    grid = make_grid(1, [ONE])
    (slot,) = grid.pool.slots
    step(grid)
    slot.started_s -= 301.0
    grid.pool._feed()
    assert (slot.pid, slot.num_failed_starts) == (None, 1)
    grid.pool._feed()
    assert slot.pid is not None


def test_process_that_ends_before_its_first_client_has_ended_none(make_grid, processes, caplog):
    grid = make_grid(2, [ONE, TWO])
    dead, other = grid.pool.slots
    grid.pool._feed()
    for _ in range(4):  # What it has said is heard first.
        processes[0].die()
        step(grid)
    assert dead.is_retired
    (first, second) = submit(grid, 0, 1)
    assert other.task is first  # Both are the other device's now.
    assert grid.pool._waiting == [second]
    assert "slot 0 on cuda:0 has ended. It has had no client yet; it is started once more" in caplog.text


def test_slot_that_is_not_started_again_gets_no_client(make_grid, processes):
    grid = make_grid(2, [ONE, ONE])
    step(grid)
    grid.pool.slots[0].end()
    grid.pool.slots[0].is_retired = True
    submit(grid, 0, 1)
    assert [client_of(grid, n) for n in range(2)] == [None, 0]


def test_process_that_does_not_read_is_another_ones_turn(make_grid, processes, monkeypatch):
    monkeypatch.setattr("unsloth_multigpu.federated.slot._SEND_LIMIT_S", 0.01)
    monkeypatch.setattr("unsloth_multigpu.federated.slot._END_S", 0.0)
    grid = make_grid(1, [ONE])
    task = make_task(0)
    task.message.content["arrays"] = ArrayRecord({"w": Array(np.zeros(10**6))})
    grid.pool._waiting.append(task)
    step(grid)
    assert processes[0].is_killed
    grid.pool._listen(0.0)
    assert grid.pool._waiting == [task]
    assert task.record.attempts == 1


def test_client_whose_process_has_died_is_tried_on_another_device_and_first(make_grid, processes):
    grid = make_grid(4, [ONE, TWO])
    tasks = submit(grid, 0, 1, 2, 3)
    assert [client_of(grid, n) for n in range(2)] == [0, 1]
    processes[0].die()
    step(grid)
    processes[1].say("done", Message(RecordDict(), reply_to=tasks[1].message), 0)
    step(grid)
    assert client_of(grid, 1) == 0
    assert tasks[0].record.attempts == 2
    # A device that is alone has to try it again itself.
    alone = make_grid(1, [ONE])
    (task,) = submit(alone, 0)
    processes[0].die()
    for _ in range(2):
        step(alone)
    assert alone.pool.slots[0].task is task


def test_balanced_goes_by_measured_seconds_but_not_by_those_of_a_first_task(make_grid, processes):
    grid = make_grid(3, [ONE], placement="balanced")
    for number, (client_id, seconds) in enumerate(((0, 100.0), (1, 1.0), (2, 8.0))):
        (task,) = submit(grid, client_id)
        task.record.begin_s -= seconds
        processes[0].say("done", Message(RecordDict(), reply_to=task.message), 5)
        step(grid)
        assert task.is_first is (number == 0)
        assert task.record.peak_memory_bytes == 5
    assert {n: round(s) for n, s in grid.pool.seconds["train"].items()} == {1: 1, 2: 8}
    submit(grid, 1, 2)
    assert client_of(grid, 0) == 2
    grid.new_clients(3)
    assert grid.pool.seconds == {}


def test_error_leaves_no_message_behind(make_grid, monkeypatch):
    grid = make_grid(2, [ONE])
    message = Message(RecordDict(), 1, "train")
    forgotten = weakref.ref(message)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(grid.pool, "_feed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grid.send_and_receive([message])
    del message
    assert grid.pool.slots[0].pid is None
    gc.collect()
    assert forgotten() is None
    grid.close()
    with pytest.raises(FederatedError, match="closed"):
        grid.send_and_receive([])


def test_slot_whose_log_was_removed_has_no_place_to_tell(tmp_path, processes):
    slot = Slot(0, ONE, tmp_path / "logs")
    slot.start({})
    shutil.rmtree(tmp_path / "logs")
    assert slot.place_in_code() == ""
    slot.end()


def test_client_that_raises_is_told_and_its_tensors_are_gone(monkeypatch):
    held, is_gone = [], []
    monkeypatch.setattr(worker, "check_device", lambda kind: is_gone.append(held[-1]() is None))
    given = make_task(0)

    def train(message, context):
        tensor = torch.ones(1)
        held.append(weakref.ref(tensor))
        raise RuntimeError("no\nluck")

    kind, text, lines = worker.run_client(train, "cpu", given.message, given.context)
    assert (kind, text) == ("failed", "RuntimeError: no luck")
    assert "in train\n" in lines
    assert is_gone == [True]


def test_client_of_a_device_that_is_lost_is_for_another_process(monkeypatch):
    def check_device(kind):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(worker, "check_device", check_device)
    given = make_task(0)
    answer = worker.run_client(lambda message, context: None, "cpu", given.message, given.context)
    assert answer == (
        "unusable",
        "its device failed: TypeError: the ClientApp returned NoneType, expected flwr.app.Message",
    )


def pair() -> tuple[Frames, Frames]:
    ours, theirs = socket.socketpair()
    return Frames(ours, 60.0), Frames(theirs, 60.0)


def test_frames_of_any_size_pass():
    one, other = pair()
    sizes = [0, 5, 2**20 + 1, 10**7]
    sender = threading.Thread(target=lambda: [one.send(b"x" * size) for size in sizes])
    sender.start()
    got = []
    while len(got) < len(sizes):
        got += other.receive()
    sender.join()
    assert [len(message) for message in got] == sizes
    assert not other.has_more()
    one.close()
    assert other.receive() is None
    other.close()


def test_header_alone_holds_nobody():
    ours, theirs = socket.socketpair()
    reader = Frames(ours, 0.05)
    theirs.sendall((4).to_bytes(8, "big"))
    assert reader.receive() == []  # None after the limit, had it waited.
    theirs.sendall(b"body" + (0).to_bytes(8, "big"))
    assert reader.receive() == [b"body"]
    assert reader.has_more()
    assert reader.receive() == [b""]
    assert not reader.has_more()
    theirs.close()
    assert reader.has_more()
    assert reader.receive() is None
    reader.close()


def test_half_a_frame_is_none():
    ours, theirs = socket.socketpair()
    other = Frames(theirs, 1.0)
    ours.sendall((100).to_bytes(8, "big") + b"half")
    ours.close()
    assert other.receive() == []
    assert other.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        other.send(b"x")
    other.close()
