"""How many ranks a machine is asked to run, and how this process becomes their supervisor."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.helpers.refused import refused
from unsloth_multigpu import start
from unsloth_multigpu.accelerator import HIDDEN
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.launch import launcher
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.start import needs_supervisor, ranks_to_start, start_this_command
from unsloth_multigpu.wire.context import RunContext

SEVERAL_NODES = {"nnodes": 2, "rdzv_endpoint": "node1:29400", "rdzv_id": "job"}


@pytest.fixture(autouse=True)
def visible_devices(monkeypatch):
    """`ranks_to_start` hides devices from this process; the variable comes back after each test."""
    for name in HIDDEN:
        monkeypatch.setenv(name, "0,1")


def see(monkeypatch, kind, count):
    monkeypatch.setattr(start, "visible_accelerators", lambda: (kind, count))


@pytest.mark.parametrize(
    ("kind", "count", "num_gpus", "device", "num_ranks"),
    [
        ("cuda", 4, None, "auto", 4),
        ("cuda", 4, 2, "auto", 2),
        ("cuda", 4, 4, "cuda", 4),
        ("cuda", 1, None, "auto", 1),
        ("xpu", 2, None, "xpu", 2),
        ("cpu", 0, None, "auto", 1),
        ("cpu", 0, 3, "auto", 3),
        ("cpu", 0, 2, "cpu", 2),
        ("cuda", 4, None, "cpu", 1),
        ("cuda", 4, 8, "cpu", 8),
    ],
)
def test_number_of_ranks_is_what_was_asked_for(monkeypatch, kind, count, num_gpus, device, num_ranks):
    see(monkeypatch, kind, count)
    assert ranks_to_start(MultiGPUConfig(num_gpus=num_gpus, device=device)) == num_ranks


@pytest.mark.parametrize(
    ("visible", "num_gpus", "num_ranks", "of_server", "of_ranks"),
    [
        ("4,5,6,GPU-7", None, 2, "6,GPU-7", "4,5"),
        ("4,5,6,GPU-7", 1, 1, "6,GPU-7", "4,5"),
        ("0,1,2,3,4,5,6,7", None, 6, "6,7", "0,1,2,3,4,5"),
    ],
)
def test_last_devices_are_those_of_the_server(monkeypatch, visible, num_gpus, num_ranks, of_server, of_ranks):
    see(monkeypatch, "cuda", visible.count(",") + 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    config = MultiGPUConfig(num_gpus=num_gpus, generators=2)
    assert ranks_to_start(config) == num_ranks
    assert needs_supervisor(config, 1)
    assert start._reserve_server_devices(config) == {"CUDA_VISIBLE_DEVICES": of_server}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == of_ranks
    assert start._reserve_server_devices(MultiGPUConfig()) == {}


SERVER = "generators=1 needs as many CUDA devices, and at least one more for the ranks; "


@pytest.mark.parametrize(
    ("kind", "count", "options", "message", "hint"),
    [
        ("cuda", 1, {"num_gpus": 4}, "num_gpus=4, but 1 GPU(s) are visible", "Set num_gpus=1, or CUDA_VISIBLE_DEVICES"),
        ("cuda", 2, {"num_gpus": 3, "device": "cuda"}, "num_gpus=3, but 2 GPU(s) are visible", "Set num_gpus=2"),
        ("cpu", 0, {"device": "cuda"}, "device='cuda', but no such device is visible", "check the driver"),
        ("xpu", 2, {"device": "cuda"}, "device='cuda', but this machine has 2 xpu", "Set device='auto'"),
        ("cuda", 1, {"generators": 1}, SERVER + "1 cuda", "Leave generators out"),
        ("cpu", 0, {"generators": 1}, SERVER + "0 cpu", "Leave generators out"),
        ("xpu", 4, {"generators": 1}, SERVER + "4 xpu", "Leave generators out"),
        ("cuda", 4, {"generators": 1, "device": "cpu"}, "and device='cpu'", "Leave generators out"),
        ("cuda", 4, {"generators": 1, "num_gpus": 4}, "3 GPU(s) are visible beside those of gen", "num_gpus=3"),
    ],
)
def test_what_the_machine_does_not_have_is_an_error(monkeypatch, kind, count, options, message, hint):
    see(monkeypatch, kind, count)
    with refused(SetupError, message, hint):
        ranks_to_start(MultiGPUConfig(**options))


@pytest.mark.parametrize(("count", "value", "is_allowed"), [(1, "1", True), (1, "0", False), (2, "1", False)])
def test_ranks_share_the_only_card_where_nccl_is_told_so(monkeypatch, count, value, is_allowed):
    see(monkeypatch, "cuda", count)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", value)
    with nullcontext() if is_allowed else pytest.raises(SetupError, match=f"but {count} GPU"):
        assert ranks_to_start(MultiGPUConfig(num_gpus=4)) == 4


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("auto", "0,1")])
def test_cpu_ranks_see_no_gpu(monkeypatch, device, visible):
    see(monkeypatch, "cuda", 2)
    ranks_to_start(MultiGPUConfig(num_gpus=2, device=device))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    # Of Intel, which has no empty mask.
    assert os.environ["ONEAPI_DEVICE_SELECTOR"] == (visible or "*:cpu")


def test_several_ranks_need_linux(monkeypatch):
    see(monkeypatch, "cpu", 0)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert ranks_to_start(MultiGPUConfig(num_gpus=1)) == 1
    with refused(SetupError, "Several ranks need Linux; this is darwin"):
        ranks_to_start(MultiGPUConfig(num_gpus=2))


@pytest.mark.parametrize(
    ("options", "num_ranks", "expected"),
    [
        ({}, 1, False),
        ({}, 2, True),
        ({"max_restarts": 1}, 1, True),
        (SEVERAL_NODES, 1, True),
        ({"nnodes": 1}, 1, False),
        ({"enable_ddp": False}, 1, False),
    ],
)
def test_supervisor_is_there_for_several_ranks_several_nodes_and_restarts(options, num_ranks, expected):
    assert needs_supervisor(MultiGPUConfig(**options), num_ranks) is expected


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def started(monkeypatch):
    """Launchers that were asked to run; each says that its ranks ended with 7."""
    launchers = []

    def run(self):
        launchers.append(self)
        return 7

    def exit_like(code):
        raise Ended(code)

    # Other tests of this process make Trainers.
    monkeypatch.delitem(sys.modules, "transformers.trainer", raising=False)
    monkeypatch.setattr(launcher.DDPLauncher, "run", run)
    monkeypatch.setattr(start, "exit_like", exit_like)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-c", "pass", "a"])
    monkeypatch.setattr(start, "is_called_by_pytest", lambda: False)
    return launchers


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_this_process_ends_as_its_ranks_do_or_by_a_signal_before_fewer_start(started, monkeypatch, number):
    def run(self):
        started.append(self)
        self.stop = SimpleNamespace(signal_number=number, is_asked=lambda: number != 0)
        self.most_ranks = 2 if len(started) == 1 else None
        return 64 if len(started) == 1 else 7

    monkeypatch.setattr(launcher.DDPLauncher, "run", run)
    command = [sys.executable, "-X", "dev", "-c", "pass", "a"]
    expected = [(3, MultiGPUConfig()), (2, MultiGPUConfig(num_gpus=2))][: 1 if number else 2]
    with pytest.raises(Ended, match=f"-{int(number)}" if number else "7"):
        start_this_command(MultiGPUConfig(), 3)
    assert started == [launcher.DDPLauncher(command, *given) for given in expected]


def test_ranks_are_not_started_from_a_test_but_from_its_process(monkeypatch):
    # Nothing is started, whatever is broken.
    monkeypatch.setattr(start, "supervise", lambda *_, **__: pytest.fail("ranks were to be started"))
    with pytest.raises(SetupError, match="cannot start ranks from a test"):
        start_this_command(MultiGPUConfig(num_gpus=2), 2)
    code = "import _pytest; from unsloth_multigpu.start import is_called_by_pytest; print(is_called_by_pytest())"
    assert run_code(code).stdout == "False\n"


@pytest.mark.parametrize(
    ("streams", "code"),
    [("sys.stdout = sys.stderr = None", -signal.SIGTERM), ("sys.stdout.close(); sys.stderr.close()", 7)],
)
def test_supervisor_without_a_terminal_ends_as_its_ranks_do(streams, code):
    script = "from unsloth_multigpu.start import exit_like; from unsloth_multigpu.logs import tell"
    script = f"import sys; {script}; {streams}; tell('nobody reads this')"
    assert run_code(f"{script}\ntry: exit_like({code})\nexcept BaseException: pass").returncode == code


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_work_before_the_line_is_named_with_its_cost(monkeypatch, caplog, kind):
    opened = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**{kind: opened}))
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace())
    with pytest.raises(Ended):
        start_this_command(MultiGPUConfig(num_gpus=2), 2)
    (told,) = caplog.messages
    assert "comes after the import of unsloth, " in told
    assert ", work on a GPU, whose memory this process keeps" in told


@pytest.mark.usefixtures("started")
def test_trainer_that_is_there_before_the_line_is_refused(monkeypatch):
    class Trainer:
        pass

    monkeypatch.setitem(sys.modules, "transformers.trainer", SimpleNamespace(Trainer=Trainer))
    trainer = type("SFTTrainer", (Trainer,), {})()
    with pytest.raises(SetupError, match="made before enable_multi_gpu"):
        start_this_command(MultiGPUConfig(num_gpus=2), 2)
    del trainer
    with pytest.raises(Ended):
        start_this_command(MultiGPUConfig(num_gpus=2), 2)


def test_variables_that_the_user_has_set_stay_and_ranks_are_told_what_was_chosen_for_shard(tmp_path):
    config = MultiGPUConfig(shard="auto").with_shard("on")

    def told(**environment):
        return launcher.rank_environment(config, 2, tmp_path, tmp_path, "run", environment)

    assert RunContext.read(told()).shard == "on"
    names = {"OMP_NUM_THREADS", "PYTHONHASHSEED", "GLOO_SOCKET_IFNAME"}
    assert names <= told().keys()
    assert not names & told(**dict.fromkeys(names, "3")).keys()
    assert names <= told(**dict.fromkeys(names, "")).keys()


@pytest.mark.parametrize(("saves", "grace_s"), [(True, 7.0), (False, 0.0)])
def test_ranks_have_time_to_save_unless_they_are_compared(monkeypatch, tmp_path, saves, grace_s):
    found = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(launcher, "Stop", lambda signals, run_dir, num_ranks, grace_s: grace_s)
    monkeypatch.setattr(launcher.DDPLauncher, "_run_attempt", lambda self, *_: found.append(self.stop) or 0)
    launcher.DDPLauncher(["true"], 2, MultiGPUConfig(grace_s=7.0, log_dir=str(tmp_path / "logs")), saves).run()
    assert found == [grace_s]


def run_code(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_rank_without_its_supervisor_ends_and_another_process_is_no_rank():
    code = "import os; from unsloth_multigpu.launch.rank import die_with_supervisor; die_with_supervisor({})"
    assert run_code(code.format(2**30)).returncode == 128 + 9
    # A process of ours that lives, but has not started this one.
    found = run_code(code.format("os.getpid()"))
    assert (found.returncode, "was called in a process that a rank started" in found.stderr) == (1, True)


STUCK = """
import sys, threading
from types import SimpleNamespace
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.launch import rank
rank.TEARDOWN_LIMIT_S = 0.2
beat = SimpleNamespace(step=4)
events = SimpleNamespace(write=lambda kind, **facts: print(kind, facts["error"], flush=True), beat=beat)
rank._report_end(SimpleNamespace(rank=0), events, "none", threading.Event())
class Mute(ConfigError):
    def __str__(self): raise RuntimeError
sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
threading.Thread(target=threading.Event().wait).start()
raise Mute("no", hint="yes")
"""


def test_rank_that_has_said_why_it_ends_ends():
    # A thread that waits forever, as one of a process group.
    found = run_code(STUCK)
    interrupted, failed = found.stdout.splitlines()
    assert (found.returncode, interrupted) == (ConfigError.exit_code, "interrupted KeyboardInterrupt: ")
    # Each version of Python has words of its own for a text that cannot be made.
    assert failed.startswith("exception Mute: <")
