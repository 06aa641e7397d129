"""Devices, packing and slots of a federated server: without a process, or with a fake one."""

import os
import pickle
import sys
import threading
import weakref
from multiprocessing import Pipe

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Flower 1.41 needs Python 3.11", allow_module_level=True)

import torch
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from unsloth_multigpu.errors import FederatedError, SetupError, VersionError
from unsloth_multigpu.federated import client_worker as worker
from unsloth_multigpu.federated import placement as device
from unsloth_multigpu.federated.grid import CLIENT_CRASHED, CLIENT_RAISED, REPLY_UNAVAILABLE, ProcessGrid, task_identity
from unsloth_multigpu.federated.placement import SlotDevice, choose_devices, slot_environment

ONE, TWO = SlotDevice("cuda", 0), SlotDevice("cuda", 1)


@pytest.mark.parametrize(
    ("slot_device", "inherited", "shown"),
    [
        (TWO, {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (TWO, {"CUDA_VISIBLE_DEVICES": "5, GPU-abc"}, {"CUDA_VISIBLE_DEVICES": "GPU-abc"}),
        (TWO, {"HIP_VISIBLE_DEVICES": "3,2"}, {"HIP_VISIBLE_DEVICES": "2"}),
        (SlotDevice("xpu", 1), {"ZE_AFFINITY_MASK": "2,3"}, {"ZE_AFFINITY_MASK": "3"}),
    ],
)
def test_slot_sees_the_entry_of_its_device(slot_device, inherited, shown):
    told = slot_environment(slot_device, 2, 0, inherited)
    assert {name: value for name, value in told.items() if "VISIBLE" in name or "MASK" in name} == shown


def test_device_that_the_environment_does_not_show_is_an_error():
    with pytest.raises(SetupError, match="cuda:1 was chosen, but CUDA_VISIBLE_DEVICES='3'"):
        slot_environment(TWO, 2, 0, {"CUDA_VISIBLE_DEVICES": "3"})


def test_slot_knows_nothing_of_ranks_and_keeps_what_the_user_has_set(monkeypatch):
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
        (("cuda", 2), {"num_gpus": None, "device": "cuda:1", "auto_gpu": False}, "cuda:1"),
        (("cuda", 2), {"num_gpus": None, "device": "cpu", "auto_gpu": False}, "cpu:0"),
        (("cuda", 2), {"num_gpus": None, "auto_gpu": False}, "cuda:0"),
    ],
)
def test_devices_are_those_that_were_asked_for(monkeypatch, visible, asked, chosen):
    monkeypatch.setattr(device, "visible_accelerators", lambda: visible)
    assert " ".join(map(str, choose_devices(**asked))) == chosen
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("visible", "asked", "message"),
    [
        (("cuda", 2), {"num_gpus": 3}, r"cuda:2 was requested, but 2 cuda device\(s\) are visible"),
        (("cuda", 2), {"num_gpus": 1, "auto_gpu": False}, "auto_gpu=False, but num_gpus=1"),
        (("cpu", 0), {"num_gpus": None, "device": "cuda", "auto_gpu": False}, r"cuda:0 was requested, but 0"),
    ],
)
def test_devices_that_are_not_there_are_an_error(monkeypatch, visible, asked, message):
    monkeypatch.setattr(device, "visible_accelerators", lambda: visible)
    with pytest.raises(SetupError, match=message):
        choose_devices(**asked)


def test_codes_are_those_of_flower():
    assert REPLY_UNAVAILABLE == ErrorCode.REPLY_MESSAGE_UNAVAILABLE
    assert CLIENT_RAISED == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert CLIENT_CRASHED == ErrorCode.CLIENT_APP_CRASHED


@pytest.fixture(autouse=True)
def identity():
    with task_identity():
        yield


def test_identity_is_given_back_and_other_versions_of_flower_are_an_error(monkeypatch):
    before = TaskIdentity.run_id
    with task_identity():
        assert TaskIdentity.run_id != before
    assert TaskIdentity.run_id == before
    with monkeypatch.context() as patch:
        patch.delattr(TaskIdentity, "_node_id")
        with pytest.raises(VersionError, match=r"TaskIdentity differs from that of 1.41: .*_node_id"):
            task_identity().__enter__()


class FakeProcess:
    """In place of a slot's process: a thread that takes the app and answers messages; of one slot it dies."""

    started = ()

    def __init__(self, name, program, log, environment, arguments):
        self.name, self.pid = name, 1
        self.connection, self._server = Pipe()
        # Readable when the other end is closed, as a descriptor of a process that has ended.
        self.pid_descriptor, self._life = os.pipe()
        self._has_ended = threading.Event()
        FakeProcess.started = (*FakeProcess.started, name)
        threading.Thread(target=self._run, args=(environment.get("DIES", ""),), daemon=True).start()

    def _run(self, dies):
        answers = [("ready",)]
        while not (self.name.startswith(f"slot {dies}") and dies) and (fields := self._receive()) is not None:
            if isinstance(fields[0], Message):
                answers.append(("done", Message(RecordDict(), reply_to=fields[0]), 5))
            self._server.send_bytes(pickle.dumps(answers.pop()))
        self.kill("")

    def _receive(self):
        try:
            return pickle.loads(self._server.recv_bytes())
        except (EOFError, OSError):
            return None

    def kill(self, because):
        if not self._has_ended.is_set():
            self._has_ended.set()
            self._server.close()
            os.close(self._life)

    def collect(self):
        self.kill("")

    def is_mine(self):
        return True

    def has_ended(self, limit_s=0.0):
        return self._has_ended.is_set()

    def describe_end(self):
        return f"{self.name} has ended"


@pytest.fixture
def make_grid(tmp_path, monkeypatch):
    """A grid whose slots are fake processes."""
    monkeypatch.setattr("unsloth_multigpu.federated.grid.Child", FakeProcess)
    monkeypatch.setattr(FakeProcess, "started", ())
    grids = []

    def make(num_clients, devices, **options):
        grids.append(ProcessGrid(None, num_clients, devices, log_dir=str(tmp_path / "logs"), **options))
        return grids[-1]

    yield make
    for grid in grids:
        grid.close()


def send(grid, *client_ids):
    replies = grid.send_and_receive([Message(RecordDict(), n + 1, "train") for n in client_ids])
    records, grid.records = grid.records, []
    return replies, records


def test_grid_has_flowers_two_calls_that_strategies_need(make_grid):
    grid = make_grid(3, [ONE, TWO])
    assert grid.devices_of_slots == ["cuda:0", "cuda:1"]
    assert grid.send_and_receive([]) == []
    with pytest.raises(FederatedError, match="ProcessGrid does not support this call"):
        grid.push_messages([])


def test_slot_that_does_not_start_leaves_its_clients_to_the_others(make_grid, monkeypatch, caplog):
    monkeypatch.setenv("DIES", "0")
    grid = make_grid(4, [ONE, TWO])
    for _ in range(2):
        replies, records = send(grid, 2, 0, 1, 3)
        assert all(reply.has_content() for reply in replies)
        assert [reply.metadata.src_node_id for reply in replies] == [3, 1, 2, 4]
        assert {(record.device, record.peak_memory_bytes) for record in records} == {("cuda:1", 5)}
    assert FakeProcess.started.count("slot 0 on cuda:0") == 1
    assert "slot 0 on cuda:0 has ended, before it was ready: other slots run its clients" in caplog.text
    alone = make_grid(1, [ONE])
    with pytest.raises(FederatedError, match="No slot is left: slot 0 on cuda:0 has ended, before it was ready"):
        send(alone, 0)


def test_balanced_goes_by_measured_seconds(make_grid):
    grid = make_grid(3, [ONE], placement="balanced")
    send(grid, 0, 1, 2)
    grid._seconds |= {"train": {0: 1.0, 1: 8.0, 2: 3.0}, "evaluate": {2: 99.0}}
    _, records = send(grid, 0, 1, 2)
    assert [r.client_id for r in sorted(records, key=lambda r: r.begin_s)] == [1, 2, 0]


def test_client_that_raises_is_told_and_its_tensors_are_gone(monkeypatch):
    held, is_gone = [], []
    monkeypatch.setattr(worker, "check_device", lambda kind: is_gone.append(held[-1]() is None))
    message, context = Message(RecordDict(), 1, "train"), Context(1, 1, {}, RecordDict(), {})

    def train(message, context):
        tensor = torch.ones(1)
        held.append(weakref.ref(tensor))
        raise RuntimeError("no\nluck")

    kind, text, lines = worker.run_client(train, "cpu", message, context)
    assert (kind, text) == ("failed", "RuntimeError: no luck")
    assert "in train\n" in lines
    assert is_gone == [True]
