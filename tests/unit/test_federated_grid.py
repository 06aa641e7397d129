"""Devices, packing, dispatch and frames of a federated server's slots: without a process."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import shutil
import socket
import sys
import threading
import weakref
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Flower 1.41 needs Python 3.11", allow_module_level=True)

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from tests.helpers.run import ROOT, run_python
from unsloth_multigpu.errors import FederatedError, SetupError, VersionError
from unsloth_multigpu.federated import device, task, user_code, worker
from unsloth_multigpu.federated.apps import make_client_app
from unsloth_multigpu.federated.device import SlotDevice, choose_devices, slot_environment
from unsloth_multigpu.federated.dispatch import MeasuredCosts, Queues, slots_to_have
from unsloth_multigpu.federated.grid import GridOptions, ProcessGrid, task_identity
from unsloth_multigpu.federated.slot import Slot
from unsloth_multigpu.federated.task import Task
from unsloth_multigpu.federated.user_code import Outcome
from unsloth_multigpu.wire.frames import Frames
from unsloth_multigpu.wire.process import is_alive

GB = 2**30
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
        (("cuda", 2), {"num_gpus": 3}, r"num_gpus=3, but 2 cuda device\(s\) are visible"),
        (("cuda", 2), {"num_gpus": 1, "auto_gpu": False}, "auto_gpu=False, but num_gpus=1"),
        (("cuda", 2), {"num_gpus": None, "device": "cuda:2", "auto_gpu": False}, "shows 2 cuda"),
        (("cpu", 0), {"num_gpus": None, "device": "cuda", "auto_gpu": False}, "shows no accelerator"),
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


class Holder:
    """As a ClientApp holds the user's functions: in a method of an object of this package."""

    def __init__(self, function):
        self.function = functools.partial(function)
        self.functions = {"train.default": self.handle}

    def handle(self):
        return self.function()


def test_object_that_cannot_travel_is_named_with_its_function():
    lock = threading.Lock()

    def helper():
        return lock

    def train_fn():
        return helper()

    with pytest.raises(SetupError, match=r"because of the variable 'lock' of .*helper\(\), a _thread.lock: cannot"):
        user_code.pack(Holder(train_fn))
    assert user_code.find_culprit({"a": 1, "b": [lock]}) == ("[0]", lock)


def test_functions_that_travel_share_their_globals():
    source = "count = 0\ndef step():\n    global count\n    count += 1\ndef read():\n    return count"
    names = {"__name__": "__main__"}
    exec(source, names)
    step, read = user_code.unpack(user_code.pack([names["step"], names["read"]]))
    step()
    assert (read(), names["count"]) == (1, 0)


def test_large_app_is_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(user_code, "_WARN_BYTES", 100)
    user_code.pack("x" * 200)
    assert "load data and models inside them" in caplog.text


def test_missing_library_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(SetupError, match=r"(?s)needs cloudpickle.*pip install"):
        user_code.pack(1)


def test_outcome_holds_what_a_client_raises_and_lets_ctrl_c_go_on():
    outcome = Outcome()
    with outcome:
        raise ValueError("no\ndata")
    assert str(outcome) == "ValueError: no data"
    with pytest.raises(KeyboardInterrupt), outcome:
        raise KeyboardInterrupt


def test_codes_are_those_of_flower():
    assert task.REPLY_UNAVAILABLE == ErrorCode.REPLY_MESSAGE_UNAVAILABLE
    assert task.CLIENT_RAISED == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert task.CLIENT_CRASHED == ErrorCode.CLIENT_APP_CRASHED


@pytest.fixture(autouse=True)
def identity():
    with task_identity(77):
        yield


def make_task(client_id: int, kind: str = "train") -> Task:
    context = Context(run_id=1, node_id=client_id + 1, node_config={}, state=RecordDict(), run_config={})
    return Task(Message(RecordDict(), client_id + 1, kind), context)


def done(
    costs: MeasuredCosts, client_id: int, where: SlotDevice, seconds: float, examples: int, memory_bytes=0
) -> None:
    """Notes a message that was answered."""
    answered = make_task(client_id)
    answered.begin(0, where, is_first=False)
    content = RecordDict({"m": MetricRecord({"num-examples": examples})})
    answered.answer(Message(content, reply_to=answered.message))
    answered.seconds, answered.peak_memory_bytes = seconds, memory_bytes
    costs.note(answered)


def take_all(queues: Queues, where: SlotDevice) -> list[int]:
    found = []
    while (taken := queues.take(where, [], {})) is not None:
        found.append(taken.client_id)
    return found


def test_round_robin_keeps_clients_on_their_device():
    queues = Queues("round_robin", MeasuredCosts())
    queues.deal([make_task(n) for n in (4, 1, 0, 3, 2)], {ONE: 1, TWO: 1}, {ONE: 1, TWO: 1})
    assert take_all(queues, ONE) == [4, 0, 2]
    # It helps nobody: the user has asked for this device.
    assert queues.take(ONE, [], {}) is None
    assert take_all(queues, TWO) == [1, 3]


def test_clients_of_a_device_that_is_gone_go_to_the_others():
    queues = Queues("round_robin", MeasuredCosts())
    queues.deal([make_task(n) for n in range(4)], {ONE: 1, TWO: 1}, {})
    queues.deal([], {TWO: 1}, {})
    assert take_all(queues, ONE) == []
    assert sorted(take_all(queues, TWO)) == [0, 1, 2, 3]


def test_balanced_goes_by_measured_seconds():
    costs = MeasuredCosts()
    for client_id, seconds in enumerate((8.0, 1.0, 1.0, 6.0, 1.0, 1.0)):
        done(costs, client_id, ONE, seconds, 10)
    queues = Queues("balanced", costs)
    queues.deal([make_task(n) for n in range(6)], {ONE: 1, TWO: 1}, {})
    first = [queues.take(where, [], {}).client_id for where in (ONE, TWO)]
    assert first == [0, 3]
    # The first one ends with its own, and helps.
    rest = [queues.take(ONE, [], {}) for _ in range(4)]
    assert {t.client_id for t in rest} == {1, 2, 4, 5}


def test_balanced_goes_by_measured_speed():
    costs = MeasuredCosts()
    done(costs, 0, ONE, 1.0, 100)
    done(costs, 1, TWO, 4.0, 100)
    assert costs.speed("train", ONE) == 100.0
    assert costs.speed("train", TWO) == 25.0
    assert costs.speed("evaluate", TWO) == 1.0
    assert costs.client("train", 0).cost == costs.client("train", 1).cost == costs.client("train", 5).cost == 100
    queues = Queues("balanced", costs)
    queues.deal([make_task(n) for n in range(5)], {ONE: 1, TWO: 1}, {})
    assert queues.num_waiting(ONE) == 4
    costs.forget_clients()
    assert costs.client("train", 0).cost == 1.0
    assert costs.speed("train", ONE) == 100.0


def test_slow_device_helps_only_where_the_other_would_be_later():
    costs = MeasuredCosts()
    for client_id, where, seconds in ((0, ONE, 1.0), (1, TWO, 10.0), (1, ONE, 1.0), (2, ONE, 0.5)):
        done(costs, client_id, where, seconds, round(100 * seconds) if where == ONE else 100)
    assert (costs.speed("train", ONE), costs.speed("train", TWO)) == (100.0, 10.0)
    queues = Queues("balanced", costs)
    queues.deal([make_task(n) for n in (0, 1)], {ONE: 1, TWO: 1}, {})
    assert (queues.num_waiting(ONE), queues.num_waiting(TWO)) == (2, 0)
    assert queues.take(TWO, [], {}) is None  # It needs 10 s for what the other one has done in 2.
    assert queues.take(ONE, [], {}).client_id == 0


def test_device_helps_the_one_that_has_most_seconds_to_do():
    costs = MeasuredCosts()
    three = SlotDevice("cuda", 2)
    done(costs, 0, ONE, 1.0, 100)
    done(costs, 1, TWO, 10.0, 100)
    done(costs, 2, three, 1.0, 100)
    queues = Queues("balanced", costs)
    queues.deal([make_task(n) for n in range(2)], {ONE: 1}, {})
    slow = make_task(9)
    slow.begin(0, ONE, is_first=False)
    queues.put_first(slow, [TWO])
    # Two clients wait for the first device, 2 s; one for the second, 10 s.
    assert queues.take(three, [], {}) is slow


def test_two_slots_do_not_wait_twice_as_long():
    costs = MeasuredCosts()
    for client_id in range(2):
        done(costs, client_id, ONE, 1.0, 100)
    done(costs, 3, TWO, 1.5, 100)
    for num_slots, helps in ((2, False), (1, True)):
        queues = Queues("balanced", costs)
        queues.deal([], {ONE: num_slots, TWO: 1}, {})
        for client_id in (2, 0):
            queues.put_first(make_task(client_id), [ONE])
        assert (queues.take(TWO, [], {}) is not None) is helps


def test_device_helps_only_with_what_fits_there():
    costs = MeasuredCosts()
    for client_id, where, size in ((0, ONE, 20), (1, ONE, 20), (2, TWO, 1)):
        done(costs, client_id, where, 1.0, 10, size * GB)
    memory = {ONE: 24 * GB, TWO: 8 * GB}
    queues = Queues("balanced", costs)
    queues.deal([make_task(n) for n in range(3)], {ONE: 1, TWO: 1}, memory)
    assert [queues.take(where, [], memory).client_id for where in (ONE, TWO)] == [0, 2]
    assert queues.take(TWO, [], memory) is None


@pytest.mark.parametrize("how", ["round_robin", "balanced"])
def test_large_clients_of_a_device_that_is_gone_are_tried_elsewhere(how):
    costs = MeasuredCosts()
    done(costs, 0, ONE, 1.0, 10, 20 * GB)
    memory = {ONE: 24 * GB, TWO: 8 * GB}
    queues = Queues(how, costs)
    queues.deal([make_task(n) for n in range(3)], {ONE: 1, TWO: 1}, memory)
    queues.deal([], {TWO: 1}, memory)
    found = [queues.take(TWO, [], memory) for _ in range(3)]
    assert sorted(t.client_id for t in found) == [0, 1, 2]


def test_dealing_asks_for_each_client_once(monkeypatch):
    costs, num_clients, asked = MeasuredCosts(), 200, []
    for client_id in range(num_clients):
        done(costs, client_id, (ONE, TWO)[client_id % 2], 1.0, 10)
    speed = MeasuredCosts.speed
    monkeypatch.setattr(MeasuredCosts, "speed", lambda *args: asked.append(1) or speed(*args))
    queues = Queues("balanced", costs)
    queues.deal([make_task(n) for n in range(2 * num_clients)], {ONE: 1, TWO: 1}, {})
    assert len(asked) < 4 * num_clients


def test_what_a_process_does_first_and_what_fails_is_no_measure():
    costs = MeasuredCosts()
    first = make_task(0)
    first.begin(0, ONE, is_first=True)
    first.answer(Message(RecordDict(), reply_to=first.message))
    first.seconds = 100.0
    costs.note(first)
    done(costs, 1, ONE, 2.0, 0)
    failed = make_task(2)
    failed.begin(0, ONE, is_first=False)
    failed.fail(2, "ValueError: no")
    failed.seconds = 100.0
    costs.note(failed)
    assert [costs.client("train", n).cost for n in range(3)] == [2.0] * 3


def test_client_starts_beside_others_only_while_it_fits():
    costs = MeasuredCosts()
    for client_id, size in enumerate((6, 5, 3)):
        done(costs, client_id, ONE, 1.0, 10, size * GB)
    memory = {ONE: 10 * GB}
    queues = Queues("balanced", costs)
    queues.deal([make_task(n) for n in range(3)], {ONE: 2}, memory)
    first = queues.take(ONE, [], memory)
    assert first.client_id == 0
    beside = queues.take(ONE, [first], memory)
    assert beside.client_id == 2
    assert queues.take(ONE, [first, beside], memory) is None
    assert queues.take(ONE, [], memory).client_id == 1


def test_client_that_has_run_fits_whatever_was_free():
    costs = MeasuredCosts()
    done(costs, 0, ONE, 1.0, 10, 6 * GB)
    queues = Queues("balanced", costs)
    queues.deal([make_task(0)], {ONE: 1}, {ONE: 5 * GB})
    assert queues.take(ONE, [], {ONE: 5 * GB}).client_id == 0


def test_client_whose_slot_has_died_is_tried_elsewhere():
    queues = Queues("round_robin", MeasuredCosts())
    queues.deal([make_task(n) for n in range(4)], {ONE: 1, TWO: 1}, {})
    dead = queues.take(ONE, [], {})
    dead.begin(0, ONE, is_first=False)
    queues.put_first(dead, [ONE, TWO])
    assert queues.take(TWO, [], {}) is dead
    queues.put_first(dead, [ONE])
    assert queues.take(ONE, [], {}) is dead


def test_device_holds_the_slots_that_its_memory_allows():
    assert slots_to_have(79 * GB, 12 * GB, ONE, 100) == 5
    assert slots_to_have(79 * GB, 12 * GB, ONE, 2) == 2
    assert slots_to_have(GB, 12 * GB, ONE, 100) == 1
    assert slots_to_have(22 * GB, 2 * GB, SlotDevice("cpu", 0), 100) == 9


def test_error_reply_names_client_round_and_slot():
    failed = make_task(3)
    failed.begin(1, TWO, is_first=False)
    failed.fail(2, "ValueError: no")
    assert failed.reply.error == Error(2, "client 3 (round 0, train) on slot 1, cuda:1: ValueError: no")
    record = failed.record()
    assert (record.client_id, record.slot, record.device, record.attempts) == (3, 1, "cuda:1", 1)


def test_identity_is_that_of_the_grid_in_use_and_is_given_back(tmp_path):
    grids = [ProcessGrid(None, 1, [ONE], GridOptions(log_dir=str(tmp_path / name))) for name in "ab"]
    for grid in [*grids, grids[0]]:
        with grid.identity():
            assert TaskIdentity.run_id == grid.run.run_id
        assert TaskIdentity.run_id == 77
    for grid in grids:
        grid.close()
    assert TaskIdentity.run_id == 77


def test_other_version_of_flower_is_an_error(monkeypatch, tmp_path):
    grid = ProcessGrid(None, 1, [ONE], GridOptions(log_dir=str(tmp_path)))
    monkeypatch.delattr(TaskIdentity, "_node_id")
    with pytest.raises(VersionError, match="TaskIdentity has no _node_id"):
        task_identity(5).__enter__()
    for module in ("task_identity", "run"):
        monkeypatch.setitem(sys.modules, f"flwr.supercore.{module}", None)
    with pytest.raises(VersionError, match="has no TaskIdentity where"):
        task_identity(5).__enter__()
    with pytest.raises(VersionError, match="has no Run where"):
        grid.run  # noqa: B018 (it is made when it is asked for)
    grid.close()


def test_grid_that_has_no_such_client_says_so(tmp_path):
    with ProcessGrid(None, 2, [ONE], GridOptions(log_dir=str(tmp_path))) as grid:
        assert grid.devices_of_slots == ["cuda:0"]
        assert grid.run.run_id == TaskIdentity.run_id
        with pytest.raises(FederatedError, match="for node 3, but the nodes are 1 to 2"):
            grid.send_and_receive([grid.create_message(RecordDict(), "train", 3, "1")])
        assert grid.send_and_receive([]) == []
    assert TaskIdentity.run_id == 77


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        (GridOptions(clients_per_gpu=2), "cuda:0 cuda:1 cuda:0 cuda:1"),
        (GridOptions(clients_per_gpu=2, max_workers=3), "cuda:0 cuda:1 cuda:0"),
        (GridOptions(max_workers=1), "cuda:0"),
        (GridOptions(clients_per_gpu="auto"), "cuda:0 cuda:1"),
    ],
)
def test_slots_are_spread_over_the_devices(tmp_path, monkeypatch, options, slots):
    monkeypatch.chdir(tmp_path)
    with ProcessGrid(None, 2, [ONE, TWO], options) as grid:
        assert " ".join(grid.devices_of_slots) == slots


def test_grid_that_nobody_closes_ends_without_a_word(tmp_path):
    program = (
        "from unsloth_multigpu.federated.grid import *\n"
        "grid = ProcessGrid(None, 1, [SlotDevice('cpu', 0)], GridOptions())\n"
        "grid.pool.step(0.0)\n"
        "print(grid.pool.slots[0].pid)"
    )
    ended = run_python(["-c", program], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert (ended.code, ended.err) == (0, "")
    assert not is_alive(int(ended.out))


class FakeProcess:
    """In place of a slot's process: answers over the slot's frames, when and as the test says."""

    says: tuple | None = ("ready", 80 * GB)

    def __init__(self, name, program, log, environment, arguments):
        self.name, self.environment, self.pid = name, environment, 0
        self.connection, theirs = socket.socketpair()
        self._frames = Frames(theirs, 0.0)
        # Readable when the other end is closed, as a descriptor of a process that has ended.
        self.pid_descriptor, self._life = os.pipe()
        self._received = []
        self._has_ended = False
        if self.says:
            self._say(*self.says)

    def _say(self, *fields):
        self._frames.put(pickle.dumps(fields))
        assert self._frames.flush()

    def client(self):
        """The message that it has and has not answered; None where it waits."""
        with suppress(BlockingIOError):
            while not self._has_ended and (messages := self._frames.receive()):
                self._received += map(pickle.loads, messages)
        tasks = [fields for fields in self._received if isinstance(fields[0], Message)]
        return tasks[0] if tasks else None

    def answer(self, peak_bytes=0, state=None, error="", is_out_of_memory=False):
        message, _ = self.client()
        self._received.clear()
        reply = Message(Error(2, error) if error else RecordDict(), reply_to=message)
        self._say("done", reply, state or RecordDict(), peak_bytes, error, "", is_out_of_memory)

    def die(self):
        if not self._has_ended:
            self._has_ended = True
            self._frames.close()
            os.close(self._life)

    collect = die

    def kill(self, because):
        self.die()

    def is_mine(self):
        return True

    def has_ended(self):
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
    """A grid whose slots are fake processes; they are ready."""
    with ExitStack() as grids:

        def make(num_clients, devices, **options):
            options = GridOptions(log_dir=str(tmp_path / "logs"), **options)
            grid = ProcessGrid(None, num_clients, devices, options)
            grids.callback(grid.close)
            grid.pool.step(0.0)
            return grid

        yield make


def send(grid, clients):
    """Sends messages, and lets those begin that find a slot."""
    ids = grid.push_messages([Message(RecordDict(), n + 1, "train") for n in clients])
    grid.pool.step(0.0)
    return ids


def end_all(grid, processes, peak_bytes=0):
    """What runs ends; what waits begins, also in slots that are new."""
    for process in [process for process in processes.values() if process.client() is not None]:
        process.answer(peak_bytes)
    for _ in range(3):
        grid.pool.step(0.0)


def slots_of(grid):
    return [grid.devices_of_slots.count(str(where)) for where in (ONE, TWO)]


def test_devices_share_the_limit_of_slots(make_grid, processes):
    grid = make_grid(10, [ONE, TWO], clients_per_gpu="auto", max_workers=4)
    send(grid, range(10))
    end_all(grid, processes, 4 * GB)
    assert slots_of(grid) == [2, 2]


def test_slots_are_added_when_clients_wait(make_grid, processes):
    grid = make_grid(10, [ONE, TWO], clients_per_gpu="auto")
    for clients, expected in (([0, 1], [1, 1]), ([0, 1, 2], [2, 1]), (range(10), [4, 4])):
        ids, replies = send(grid, clients), []
        end_all(grid, processes, 17 * GB)
        assert slots_of(grid) == expected
        while len(replies) < len(ids):
            replies += grid.pull_messages(ids)
            end_all(grid, processes, 17 * GB)


def test_no_slots_are_added_after_one_was_too_many(make_grid, processes):
    grid = make_grid(8, [ONE], clients_per_gpu="auto")
    send(grid, range(2))
    end_all(grid, processes, 17 * GB)
    assert len(grid.pool.slots) == 2
    send(grid, range(2, 8))
    processes[1].answer(17 * GB, error="RuntimeError: CUBLAS_STATUS_ALLOC_FAILED", is_out_of_memory=True)
    grid.pool.step(0.0)
    assert grid.pool.slots[1].is_retired
    end_all(grid, processes, 17 * GB)
    assert grid.pool._queues.num_waiting(ONE) > 3
    assert len(grid.pool.slots) == 2


@pytest.mark.parametrize(("peak_bytes", "num_slots"), [(GB, 3), (16 * GB, 2)])
def test_slots_of_the_cpu_have_equal_threads_and_shares_of_the_memory(
    make_grid, processes, monkeypatch, peak_bytes, num_slots
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    devices = [SlotDevice("cpu", 0), SlotDevice("cpu", 1)]
    grid = make_grid(16, devices, clients_per_gpu="auto", max_workers=6)
    send(grid, range(16))
    end_all(grid, processes, peak_bytes)
    # Each has half of the 80 GB: two of 16 GB, although four would fit into the whole.
    assert [grid.devices_of_slots.count(f"cpu:{n}") for n in range(2)] == [num_slots] * 2
    assert len(processes) == 2 * num_slots
    assert {process.environment["OMP_NUM_THREADS"] for process in processes.values()} == {"1"}


def test_new_clients_are_not_measured_by_the_old_ones(make_grid):
    grid = make_grid(2, [ONE])
    done(grid.pool.costs, 0, ONE, 8.0, 10)
    assert grid.pool.costs.client("train", 0).cost == 10.0
    grid.new_clients(3)
    assert grid.pool.costs.client("train", 0).cost == 1.0


def test_slot_that_does_not_become_ready_is_started_again(make_grid, monkeypatch):
    monkeypatch.setattr(FakeProcess, "says", None)
    grid = make_grid(1, [ONE], start_timeout_s=30.0)
    (slot,) = grid.pool.slots
    assert slot.is_live
    slot.started_s -= 31.0
    grid.pool.step(0.0)
    assert (slot.is_live, slot.num_failed_starts) == (False, 1)
    grid.pool.step(0.0)
    assert slot.is_live


def test_client_that_raised_leaves_no_state(make_grid, processes):
    grid = make_grid(2, [ONE])
    left, kept = RecordDict({"n": MetricRecord({"n": 1})}), RecordDict({"n": MetricRecord({"n": 2})})
    for state, error in ((kept, ""), (left, "ValueError: half done")):
        ids = send(grid, [0])
        processes[0].answer(state=state, error=error)
        (reply,) = grid.pull_messages(ids)
        assert reply.has_error() is bool(error)
        assert grid.client_states() == {0: kept}


def test_process_that_ends_before_its_first_client_has_ended_none(make_grid, processes, caplog):
    grid = make_grid(2, [ONE, TWO])
    dead, other = grid.pool.slots
    processes[0].die()
    send(grid, [0, 1])
    assert dead.task is None
    processes[0].die()
    grid.pool.step(0.0)
    assert dead.task is None
    assert dead.is_retired
    assert other.task.client_id == 1
    assert grid.pool._queues.num_waiting(TWO) == 1
    assert "slot 0 on cuda:0 has ended. It has had no client yet; it is started once more" in caplog.text


@pytest.mark.parametrize("what", ["submit", "step"])
def test_error_leaves_no_message_behind(make_grid, processes, monkeypatch, what):
    grid = make_grid(2, [ONE])
    message = Message(RecordDict(), 1, "train")
    forgotten, ids = weakref.ref(message), grid.push_messages([message])
    del message
    grid.pool.step(0.0)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(grid.pool, what, interrupted)
        with pytest.raises(KeyboardInterrupt):
            grid.pull_messages([*ids, *grid.push_messages([Message(RecordDict(), 2, "train")])])
    assert not grid.pool.slots[0].is_live
    assert grid.pool._queues.num_waiting(ONE) == 0
    gc.collect()
    assert forgotten() is None
    new = send(grid, [1])
    for _ in range(2):
        end_all(grid, processes)
    assert len(grid.pull_messages([*ids, *new])) == 1
    assert [record.client_id for record in grid.take_records()] == [1]


def test_slot_whose_log_was_removed_has_no_place_to_tell(tmp_path):
    slot = Slot(0, ONE, tmp_path / "logs")
    shutil.rmtree(tmp_path / "logs")
    assert slot.place_in_code(slot.ask_for_stack()) == ""


class FakeDevice(SimpleNamespace):
    """Of a kind that torch does not have. `lost`: whatever is asked of it raises."""

    def __init__(self):
        super().__init__(reset_peak_memory_stats=lambda: None, max_memory_reserved=lambda: 5, num_emptied=0)

    def empty_cache(self):
        self.num_emptied += 1
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_answer_comes_from_a_device_that_is_lost(monkeypatch):
    fake, (server, slot) = FakeDevice(), socket.socketpair()
    monkeypatch.setattr(torch, "fake", fake, raising=False)
    monkeypatch.setattr(worker, "end_process_group", lambda: sys.exit(1))
    frames = Frames(server, 5.0)
    given = make_task(0)
    for _ in range(2):
        frames.put(given.pack())
    assert frames.flush()
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(SystemExit):
        worker.serve(Frames(slot), lambda message, _: Message(RecordDict(), reply_to=message), "fake")
    kind, _, _, peak_bytes, *_ = pickle.loads(frames.receive()[0])
    assert (kind, peak_bytes, fake.num_emptied) == ("done", 5, 2)
    frames.close()
    slot.close()


def test_own_errors_are_one_line_and_the_users_place_is_told():
    def train(message, context):
        raise FederatedError("no", hint="none")

    given = make_task(0)
    given.message.content["a"] = given.message.content["b"] = ArrayRecord()
    given.context.node_config |= {"partition-id": 0, "num-partitions": 1}
    own = make_client_app(lambda: torch.nn.Linear(1, 1), train)
    told = [pickle.loads(worker.run_client(app, "cpu", given.message, given.context))[-2] for app in (own, train)]
    assert "\n  File" not in told[0]
    assert told[0].startswith("FederatedError: ")
    assert "array" in told[0]
    assert "in train\n" in told[1]
    assert "worker.py" not in told[1]


def test_client_without_memory_is_told_from_others_and_its_tensors_are_gone(monkeypatch):
    held, is_gone = [], []
    monkeypatch.setattr(worker, "check_device", lambda kind: is_gone.append(held[-1]() is None))
    given = make_task(0)
    for text, is_out_of_memory in (("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x", True), ("no", False)):

        def train(message, context, text=text):
            tensor = torch.ones(1)
            held.append(weakref.ref(tensor))
            raise RuntimeError(text)

        assert pickle.loads(worker.run_client(train, "cpu", given.message, given.context))[-1] is is_out_of_memory
    assert is_gone == [True, True]


def pair() -> tuple[Frames, Frames]:
    ours, theirs = socket.socketpair()
    return Frames(ours, 0.0), Frames(theirs, 0.0)


def test_frames_of_any_size_pass_without_waiting():
    one, other = pair()
    sizes = [0, 5, 2**20 + 1, 10**7]
    for size in sizes:
        one.put(b"x" * size)
    got = []
    while len(got) < len(sizes):
        one.flush()
        with Blocked():
            got += other.receive()
    assert [len(message) for message in got] == sizes
    assert one.flush()
    with pytest.raises(BlockingIOError):
        other.receive()
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
    other = Frames(theirs, 0.0)
    ours.sendall((100).to_bytes(8, "big") + b"half")
    ours.close()
    assert other.receive() == []
    assert other.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        other.put(b"x") or other.flush()
    other.close()


class Blocked:
    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        return kind is BlockingIOError
