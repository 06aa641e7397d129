"""Devices and slots of a federated server, without a process."""

import os
import sys
import weakref
from contextlib import ExitStack, closing

import pytest

if sys.version_info < (3, 11):
    pytest.skip("Flower 1.41 needs Python 3.11", allow_module_level=True)

import torch
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import ErrorCode

from unsloth_multigpu.errors import FederatedError, SetupError
from unsloth_multigpu.federated import client_worker as worker
from unsloth_multigpu.federated import grid as grids
from unsloth_multigpu.federated.grid import Slot, SlotEnded, choose_devices, slot_environment

pytestmark = pytest.mark.usefixtures("may_make_messages")
ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("slot_device", "inherited", "shown"),
    [
        (TWO, {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (TWO, {"CUDA_VISIBLE_DEVICES": "5, GPU-abc"}, {"CUDA_VISIBLE_DEVICES": "GPU-abc"}),
        (TWO, {"HIP_VISIBLE_DEVICES": "3,2"}, {"HIP_VISIBLE_DEVICES": "2"}),
        (torch.device("xpu", 1), {"ZE_AFFINITY_MASK": "2, 3"}, {"ZE_AFFINITY_MASK": "3"}),
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
    seen = slot_environment(torch.device("cpu", 0), 2, 7, {**told, **ours, **users})
    no_device = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "*:cpu"}
    assert seen == {**users, **no_device, "ACCELERATE_USE_CPU": "true"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    threads = [slot_environment(ONE, n, 5, {"OMP_NUM_THREADS": ""})["OMP_NUM_THREADS"] for n in (1, 3, 20)]
    assert threads == ["8", "2", "1"]
    assert slot_environment(ONE, 1, 5, {})["PYTHONHASHSEED"] == "5"


@pytest.mark.parametrize(
    ("visible", "asked", "chosen"),
    [
        (("cuda", 2), {}, "cuda:0 cuda:1"),
        (("cuda", 4), {"num_gpus": 2}, "cuda:0 cuda:1"),
        (("cpu", 0), {}, "cpu:0"),
        (("cpu", 0), {"num_gpus": 2}, "cpu:0 cpu:1"),
        (("cuda", 2), {"device": "cuda:1", "auto_gpu": False}, "cuda:1"),
        (("cuda", 2), {"device": "cpu", "auto_gpu": False}, "cpu:0"),
        (("cuda", 2), {"auto_gpu": False}, "cuda:0"),
        (("cuda", 2), {"num_gpus": 3}, "cuda:2 was requested, but 2 cuda device(s) are visible."),
        (("cuda", 2), {"num_gpus": 1, "auto_gpu": False}, "auto_gpu=False, but num_gpus=1."),
        (("cpu", 0), {"device": "cuda", "auto_gpu": False}, "cuda:0 was requested, but 0 cuda device(s) are visible."),
    ],
)
def test_devices_are_those_that_were_asked_for_or_it_is_an_error(monkeypatch, visible, asked, chosen):
    monkeypatch.setattr("unsloth_multigpu.federated.grid.visible_accelerators", lambda: visible)
    try:
        found = " ".join(map(str, choose_devices(**{"num_gpus": None, **asked})))
    except SetupError as error:
        found = error.args[0]
    assert found == chosen
    assert not torch.cuda.is_initialized()


def test_codes_are_those_of_flower():
    assert grids.REPLY_UNAVAILABLE == ErrorCode.REPLY_MESSAGE_UNAVAILABLE
    assert grids.CLIENT_RAISED == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert grids.CLIENT_CRASHED == ErrorCode.CLIENT_APP_CRASHED


class FakeSlot(Slot):
    """A slot without a process: it answers messages; one of them does not start."""

    started: tuple[str, ...] = ()

    def start(self, app, environment):
        FakeSlot.started = (*FakeSlot.started, str(self))
        if environment.get("DIES") == str(self.index):
            raise SlotEnded(f"{self} has ended")

    def call(self, message, context):
        return "done", Message(RecordDict(), reply_to=message), 5


@pytest.fixture
def make_grid(tmp_path, monkeypatch):
    """A grid of such slots."""
    monkeypatch.setattr(grids, "Slot", FakeSlot)
    monkeypatch.setattr(FakeSlot, "started", ())
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(
            closing(grids.ProcessGrid(None, *args, log_dir=str(tmp_path / "logs"), **options))
        )


def send(grid, *client_ids):
    replies = grid.send_and_receive([Message(RecordDict(), n + 1, "train") for n in client_ids])
    records, grid.records = grid.records, []
    return replies, records


def test_slot_that_does_not_start_leaves_its_clients_to_the_others(make_grid, monkeypatch, caplog):
    monkeypatch.setenv("DIES", "0")
    grid = make_grid(4, [ONE, TWO])
    for _ in range(2):
        replies, records = send(grid, 2, 0, 1, 3)
        assert all(reply.has_content() for reply in replies)
        assert [reply.metadata.src_node_id for reply in replies] == [3, 1, 2, 4]
        assert {(record.device, record.peak_memory_bytes) for record in records} == {("cuda:1", 5)}
    assert FakeSlot.started.count("slot 0 on cuda:0") == 1
    assert "slot 0 on cuda:0 has ended, before it was ready: other slots run its clients" in caplog.text
    alone = make_grid(1, [ONE])
    with pytest.raises(FederatedError, match="No slot is left: slot 0 on cuda:0 has ended, before it was ready"):
        send(alone, 0)


def test_balanced_goes_by_measured_seconds(make_grid):
    grid = make_grid(4, [ONE], placement="balanced")
    send(grid, 0, 1, 2)
    # Client 3 has not run yet, so it counts as the mean.
    grid._seconds |= {"train": {0: 1.0, 1: 8.0, 2: 3.0}, "evaluate": {2: 99.0}}
    _, records = send(grid, 0, 1, 2, 3)
    assert [r.client_id for r in sorted(records, key=lambda r: r.begin_s)] == [1, 3, 2, 0]


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
