"""Faults as data, what they do to a rank, and what `unsloth-multigpu chaos` makes of the records."""

import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.injector import fail_at, faults_in, records
from tests.helpers.run import wait_until
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.__main__ import main
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.plugin import tool_of
from unsloth_multigpu.recorders.fault import KINDS, Fault, all_faults, chaos_variables, limit_s, parse_fault
from unsloth_multigpu.tool import Tool
from unsloth_multigpu.tools.chaos import chaos_command
from unsloth_multigpu.tools.chaos.chaos_command import Options, run_script
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.process import is_alive


class Trainer(FakeTrainer):
    """It writes a file where it saves."""

    def __init__(self, folder):
        super().__init__(torch.nn.Linear(2, 1), output_dir=str(folder))

    def _save_checkpoint(self, model, trial):
        with open(self.args.output_dir + "/model", "wb") as file:
            file.write(bytes(8192))
        self.save_model(self.args.output_dir, _internal_call=True)
        return self.args.output_dir

    def step(self):
        """One optimizer step of one micro-batch."""
        loss = self.training_step(self.model, {"input_ids": torch.tensor([[1, 2], [3, 4]])})
        self.state.global_step += 1
        self.event("on_step_end")
        return float(loss)


@pytest.fixture
def trainer(tmp_path):
    return Trainer(tmp_path)


def inject(trainer, folder, *faults, rank=0, attempt=0):
    context = RunContext.read({**faults_in(folder, *faults), "TORCHELASTIC_RESTART_COUNT": str(attempt)})
    session = SimpleNamespace(identity=SimpleNamespace(rank=rank), config=MultiGPUConfig(), context=context)
    (tool := tool_of(context)).adjusted(MultiGPUConfig(shard="auto"))
    part = tool.part(trainer, session, SimpleNamespace(passes=SimpleNamespace(current=None)))
    return Loop(trainer, [part]).steering()


@pytest.mark.parametrize(("rank", "attempt", "is_met"), [(1, 0, True), (0, 0, False), (1, 1, False)])
def test_fault_is_met_on_its_rank_in_its_attempt_and_step(trainer, tmp_path, rank, attempt, is_met):
    with inject(trainer, tmp_path, Fault("raise", 1, 3), rank=rank, attempt=attempt):
        trainer.step()
        trainer.step()
        if is_met:
            with pytest.raises(RuntimeError, match="injected by unsloth-multigpu chaos"):
                trainer.step()
        # Once: what the script makes of it is its own.
        trainer.step()
    planted = records(tmp_path, rank, "injected")
    assert [r["step"] for r in planted] == ([3] if is_met else [])
    assert all(0 <= time.monotonic() - r["time_s"] < 60 for r in planted)
    before = set(vars(trainer))
    with inject(trainer, tmp_path, Fault("raise", 1, 3), rank=rank, attempt=attempt):
        trainer.step()  # A second training of the same process.
        trainer.event("on_train_begin")
    assert set(vars(trainer)) == before
    assert records(tmp_path, rank, "begin")[0]["config"]["shard"] == "auto"  # As asked, not as decided.
    assert sum(records(tmp_path, rank, "step")[0]["samples"].values()) == 2


@pytest.mark.parametrize(
    ("fault", "limit", "error"),
    [
        (Fault("disk_full", 0, 1, phase="save"), resource.RLIMIT_FSIZE, "File too large"),
        (Fault("memory", 0, 2), resource.RLIMIT_AS, "can't allocate memory"),
    ],
)
def test_disk_or_memory_is_full_once(trainer, tmp_path, fault, limit, error):
    before = resource.getrlimit(limit)
    trainer.step()
    act = trainer.step if fault.kind == "memory" else lambda: trainer._save_checkpoint(None, None)
    with inject(trainer, tmp_path, fault):
        with pytest.raises((OSError, RuntimeError), match=error):
            act()
        assert resource.getrlimit(limit) == before
        act()


def test_faults_are_written_as_text():
    assert f"Kinds: {', '.join(KINDS)}." in Options.table()["faults"].help
    for text in ("kill@1:5", "exit@all:2", "sigterm@0:3:save"):
        assert str(parse_fault(text)) == text
    for text in ("kill", "kill@1", "kill@x:1", "kill@1:x", "fly@1:2", "kill@1:2:lunch"):
        with pytest.raises(ConfigError):
            parse_fault(text)
    chaos = tool_of(RunContext.read(fail_at("kill", 1, 5, folder="/somewhere", attempt=2)))
    assert (chaos._folder, chaos._all) == (Path("/somewhere"), [Fault("kill", 1, 5, attempt=2)])
    assert type(tool_of(RunContext.read({}))) is Tool
    # Every kind is planted, in a step of the training.
    assert {fault.kind for fault in all_faults(12, 2)} == set(KINDS)
    assert all(0 < fault.step <= 5 for num_steps in (1, 2, 5) for fault in all_faults(num_steps, 2))
    limits = [limit_s(kind, hang_timeout_s=5, grace_s=30) for kind in ("kill", "nan", "stop", "sigterm")]
    assert limits == [2, 8, 10, 30]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--faults", "fly@1:2"], "kind='fly'"),
        (["--faults", "kill@2:1"], "there are 2 ranks"),
        (["--num-gpus", "1"], "at least 2 ranks"),
    ],
)
def test_wrong_options_are_errors(tmp_path, capsys, options, message):
    script = tmp_path / "train.py"
    script.touch()
    assert main(["chaos", *options, str(script)]) == 64
    assert message in capsys.readouterr().err


def test_arguments_are_turned_aside_and_stay_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "work"
    chaos = tool_of(RunContext.read(chaos_variables("records", (), work)))

    def aside(**values):
        args = SimpleNamespace(**{"push_to_hub": True, "logging_dir": None, **values})
        chaos.adjust_arguments(args)
        chaos.adjust_arguments(args)  # As where arguments are copied.
        assert not args.push_to_hub
        return args

    here = work / "output" / tmp_path.relative_to("/")
    assert aside(output_dir="out/a").output_dir == str(here / "out/a")
    assert aside(output_dir=tmp_path / "out" / "a").output_dir == str(here / "out/a")
    assert aside(output_dir=None).output_dir == str(here / "trainer_output")
    assert aside(output_dir="../b", logging_dir="curves").logging_dir == str(here / "curves")
    assert aside(output_dir="../b").output_dir == str(here.parent / "b")
    assert aside(output_dir=f"{work}/mine").output_dir == f"{work}/mine"
    assert chaos.adjusted(MultiGPUConfig(log_dir="mine")).log_dir == str(work / "logs")
    # Faults that a test plants leave a script's folders alone.
    left = SimpleNamespace(output_dir="out", push_to_hub=True)
    plain = tool_of(RunContext.read(chaos_variables("records")))
    plain.adjust_arguments(left)
    assert (left.output_dir, left.push_to_hub) == ("out", True)
    assert plain.adjusted(MultiGPUConfig(log_dir="mine")).log_dir == "mine"


def test_processes_that_are_left_behind_are_counted_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(chaos_command, "_ORPHAN_LIMIT_S", 0.2)
    script = tmp_path / "leaves.py"
    script.write_text(
        "import subprocess, sys\n"
        "def line(): enable_multi_gpu()\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "open(sys.argv[1] + '/pid', 'w').write(str(child.pid))\n"
        "print('unsloth_multigpu: rank 1 died. The other ranks were stopped.', flush=True)\n"
        "sys.stdout.buffer.write('\u8bad\u7ec3'.encode())\n"
        "sys.exit(3)\n"
    )
    ended = run_script([str(script), "{run}"], tmp_path / "\u8bad", {"num_gpus": 2}, 60.0)
    assert (ended.code, ended.num_orphans) == (3, 1)
    assert ended.told == "rank 1 died. The other ranks were stopped."
    assert ended.output.endswith("\u8bad\u7ec3")
    pid = int((tmp_path / "\u8bad" / "work" / "pid").read_text())
    wait_until(lambda: not is_alive(pid), 60, "end of the child")
