"""The command line and the doctor's judgement, without starting ranks."""

import os
import signal
import subprocess
import sys
from unittest import mock

import pytest
import torch

from tests.helpers.options import another_value
from unsloth_multigpu import __main__ as main
from unsloth_multigpu import start, versions
from unsloth_multigpu.accelerator import HIDDEN
from unsloth_multigpu.cli import script_runner as script
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import ENV_PREFIX, MultiGPUConfig, command_options, variable
from unsloth_multigpu.tools import script_program as program
from unsloth_multigpu.tools.doctor import device_check as device
from unsloth_multigpu.tools.doctor import doctor_command as doctor
from unsloth_multigpu.tools.probe import run_probe

CPU = torch.device("cpu")


class Replaced(BaseException):
    """Stands for the end of a process that was replaced by another program."""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Records what `run` would execute, in a folder that has a train.py."""
    (tmp_path / "train.py").write_text("pass")
    monkeypatch.chdir(tmp_path)
    calls = []

    def execv(program, command):
        assert program == sys.executable
        calls.append(command)
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    clean = {n: v for n, v in os.environ.items() if not n.startswith((ENV_PREFIX, "RANK", "WORLD_SIZE"))}
    with mock.patch.dict(os.environ, clean, clear=True):
        yield calls


def run(*arguments):
    with pytest.raises(Replaced):
        main.main(["run", *arguments])


RUNNER = [sys.executable, "-m", "unsloth_multigpu.cli.script_runner"]


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (["train.py"], ["train.py"]),
        (["--num-gpus", "3", "train.py", "--num-gpus", "9"], ["train.py", "--num-gpus", "9"]),
        (["--num-gpus=3", "--", "train.py", "-h"], ["train.py", "-h"]),
        (["--no-shard-offload", "train.py", "--", "--", "-m", "x"], ["train.py", "--", "--", "-m", "x"]),
        (["--device", "cpu", "-m", "pkg.train", "--version", "run"], ["-m", "pkg.train", "--version", "run"]),
        (["train.py", "a b", "$HOME", ""], ["train.py", "a b", "$HOME", ""]),
    ],
)
def test_run_leaves_the_arguments_of_the_script_alone(started, arguments, program):
    run(*arguments)
    assert started == [[*RUNNER, *program]]


def test_option_of_the_command_behind_the_script_is_told_unless_it_is_said_whose_it_is(started, capfd):
    run("train.py", "--num-gpus=9", "--epochs", "3")
    told = capfd.readouterr().err
    assert "--num-gpus=9 comes after train.py, so the script gets it." in told
    assert "unsloth-multigpu run --num-gpus=9 ...; if not, write -- before train.py." in told
    run("--", "train.py", "--num-gpus", "9")
    run("--num-gpus", "1", "train.py", "--epochs", "3")
    assert capfd.readouterr().err == ""


NODES = {"nnodes": 3, "rdzv_endpoint": "node0:29400", "rdzv_id": "text"}
# What an option needs beside itself.
BESIDE = {**dict.fromkeys(("nnodes", "node_rank", "rdzv_endpoint", "rdzv_id"), NODES), "shard_offload": {"shard": "on"}}


@pytest.mark.parametrize("name", command_options("run"))
def test_run_hands_every_option_on_by_the_environment(started, name):
    value = 1 if name == "node_rank" else another_value(name)
    given = {**BESIDE.get(name, {}), name: value}
    arguments = [f"--{n.replace('_', '-')}={v}" for n, v in given.items() if not isinstance(v, bool)]
    arguments += [f"--{'' if v else 'no-'}{n.replace('_', '-')}" for n, v in given.items() if isinstance(v, bool)]
    run(*arguments, "train.py")
    config = MultiGPUConfig.resolve({})
    assert config == MultiGPUConfig(**given) != MultiGPUConfig()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["walk"], "there is no command 'walk'.\nHint: Commands: run, top, "),
        (["run"], "run: no script was given.\nHint: "),
        (["run", "-m"], "run: no module was given.\nHint: "),
        (["run", "absent.py", "--num-gpus", "2"], "run: there is no file 'absent.py'.\nHint: "),
        (["run", "--num-gpus", "two", "train.py"], "argument --num-gpus: invalid int value: 'two'\nHint: "),
        (["run", "--num-gpu", "2", "train.py"], "\nHint: Did you mean --num-gpus? See unsloth-multigpu run --help."),
        (["verfy", "train.py"], "there is no command 'verfy'.\nHint: Did you mean verify? Commands: run, "),
        (["bench", "--model-size", "smal"], "Hint: Did you mean small?"),
        (["run", "--balance", "token", "train.py"], "Hint: Did you mean 'tokens'? Leave balance out"),
        (["verify"], "verify: no script was given.\nHint: "),
        (["verify", "--steps", "0", "train.py"], "steps=0; expected a whole number of at least 1"),
        (["verify", "--num-gpus", "1", "--device", "cpu", "train.py"], "this would be one rank"),
        (["run", "."], "'.' is a folder; expected a script"),
        (["doctor", "--num-gpus", "-1"], "num_gpus=-1; expected a whole number of at least 1"),
    ],
)
def test_wrong_command_line_is_told_with_a_hint(started, capsys, arguments, message):
    try:
        code = main.main(arguments)
    except SystemExit as left:
        code = left.code
    out, err = capsys.readouterr()
    assert (code, out, started) == (64, "", [])
    assert message in err
    assert ("error: " in err, "Hint: " in err, "Traceback" in err) == (True, True, False)


def test_error_of_the_supervisor_ends_run_with_its_exit_code(tmp_path):
    (tmp_path / "train.py").write_text("print('begun')")
    command = [sys.executable, "-m", main.__name__, "run", "--device", "xpu", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (SetupError.exit_code, "")
    assert done.stderr.startswith("error: device='xpu', but no such device is visible.\nHint: Set device='auto'")


def test_verify_starts_no_ranks_inside_a_rank(started, capsys):
    os.environ.update(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", MASTER_ADDR="x", MASTER_PORT="1")
    assert main.main(["verify", "--device", "cpu", "train.py"]) == SetupError.exit_code
    assert "verify starts its ranks itself" in capsys.readouterr().err


def test_script_with_the_line_is_known_without_running_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = '"Add enable_multi_gpu()."\nfrom a import enable_multi_gpu  # enable_multi_gpu()\nprint(enable_multi_gpu)'
    for name, source in (("mine", "import a\nif 1:\n  a.b.enable_multi_gpu(num_gpus=2)"), ("plain", plain)):
        (tmp_path / f"{name}.py").write_text(source)
        (tmp_path / "pkg" / name).mkdir(parents=True)
        (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
        (tmp_path / "pkg" / name / "__main__.py").write_text(source)
        (tmp_path / "pkg" / f"{name}_train.py").write_text(source)
        forms = [[f"{name}.py"], ["-m", name], ["-m", f"pkg.{name}_train"], ["-m", f"pkg.{name}"]]
        assert [script.calls_enable(form) for form in forms] == [name == "mine"] * len(forms)
    assert not script.calls_enable(["-m", "pkg.absent"])
    for name, source in (("bare.py", "enable_multi_gpu()"), ("wrong.py", "enable_multi_gpu(")):
        (tmp_path / name).write_text(source)
        assert script.calls_enable([name]) == (name == "bare.py")


@pytest.mark.parametrize(
    ("device", "num_gpus", "before", "expected"),
    [
        ("auto", 1, None, {"CUDA_VISIBLE_DEVICES": "0"}),
        ("auto", 1, "2,3", {"CUDA_VISIBLE_DEVICES": "2"}),
        ("auto", 1, "GPU-abc,GPU-def", {"CUDA_VISIBLE_DEVICES": "GPU-abc"}),
        ("auto", 4, None, {}),
        *(("cpu", num_gpus, None, {**HIDDEN, "ACCELERATE_USE_CPU": "true"}) for num_gpus in (1, 2)),
    ],
)
def test_verify_shows_one_process_one_device_and_none_on_the_cpu(monkeypatch, device, num_gpus, before, expected):
    monkeypatch.setattr(start, "visible_accelerators", lambda: ("cuda", 4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    assert program.device_variables(device, num_gpus) == expected


SMALL = """
import contextlib, sys
from unsloth_multigpu.__main__ import main
for line in ("--version", "run -h", "verify -h", "doctor -h"):
    with contextlib.suppress(SystemExit):
        main(line.split())
    assert not {"torch", "transformers"} & set(sys.modules), line
"""


def test_small_commands_load_no_torch():
    run = subprocess.run([sys.executable, "-c", SMALL], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout.startswith(f"unsloth-multigpu {versions.installed_version('unsloth-multigpu')}\n")


def test_copies_with_one_flipped_bit_in_the_last_of_them_are_caught():
    calls = []

    def flip(target, source):
        target.copy_(source)
        calls.append(1)
        if len(calls) == 6:  # Three for each pair.
            target[1234] ^= 16

    assert [p["num_wrong_bytes"] for p in device.check_copies([CPU, CPU], 4096, flip)] == [0, 1]


def test_wrong_copy_fails_its_row_and_only_that():
    pair = {"source": 0, "target": 1, "num_bytes": 2**26, "gb_per_s": 1.5, "has_peer_access": True}
    pairs = [{**pair, "num_wrong_bytes": 0}, {**pair, "source": 1, "target": 0, "num_wrong_bytes": 3}]
    good, bad = device.copy_rows("cuda", pairs)
    assert (good.state, good.name) == ("ok", "cuda:0 -> cuda:1")
    assert (bad.state, bad.name) == ("FAIL", "cuda:1 -> cuda:0")
    assert bad.text.startswith(f"3 of {2**26} bytes arrived wrong")
    assert "NCCL_P2P_DISABLE=1" in bad.hint


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("transformers", "3.0.1", "FAIL"),
        ("transformers", None, "FAIL"),
        ("torch", "2.99.0+cu130", "note"),
        ("unsloth", None, "note"),
        ("unsloth", "2020.1.1", "FAIL"),
    ],
)
def test_version_outside_its_range_fails(monkeypatch, name, version, state):
    before = versions.installed_version
    monkeypatch.setattr(versions, "installed_version", lambda n: version if n == name else before(n))
    (row,) = [row for row in doctor.version_rows() if row.name == name]
    assert (row.state, row.facts["installed"]) == (state, version)
    assert bool(row.hint) == (state == "FAIL" or version == "2.99.0+cu130")
    assert row.hint.startswith((f'pip install "{name}', "Newer than tested: ")) or not row.hint


def test_gpu_that_only_the_driver_sees_fails(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 570.1; echo 570.1")
    smi.chmod(0o755)
    shown = [(row.state, row.text.partition(" torch")[0]) for row in device.device_rows("cpu", 0)]
    assert shown == [("FAIL", "nvidia-smi lists 2,")]
    smi.write_text("#!/bin/sh\necho Driver/library mismatch; exit 18")
    assert [row.state for row in device.device_rows("cpu", 0)] == ["note"]
    row = device.driver_row()
    assert (row.state, row.text.partition(",")[0]) == ("note", "NVIDIA driver none: Driver/library mismatch")


def test_last_line_says_what_failed_and_what_the_line_would_do():
    fine = doctor.CheckRow("devices", "line", "ok", "2 ranks on 2 x Tesla T4 (14.7 GiB each)")
    sentence = "With enable_multi_gpu(): 2 ranks on 2 x Tesla T4 (14.7 GiB each)."
    assert doctor.verdict([fine]) == sentence
    failed = doctor.CheckRow("versions", "peft", "FAIL", "", "Install it.")
    told = "NOT READY: 1 of 2 checks failed: peft (versions)."
    assert doctor.verdict([failed, fine]) == f"{told} After that is fixed: {sentence}"
    refused = doctor.CheckRow("devices", "line", "FAIL", "enable_multi_gpu() would raise: num_gpus=4", "Set it to 2.")
    assert doctor.verdict([refused]) == "NOT READY: 1 of 1 checks failed: line (devices)."


@pytest.mark.parametrize(
    ("options", "state", "text"),
    [
        ({}, "ok", "no GPU is visible"),
        ({**NODES, "num_gpus": 2}, "ok", "no accelerator is visible: 6 ranks"),
        ({"device": "cuda"}, "FAIL", "enable_multi_gpu() would raise: device='cuda', but no such device is visible."),
    ],
)
def test_doctor_says_what_the_line_says(monkeypatch, options, state, text):
    monkeypatch.setattr(start, "visible_accelerators", lambda: ("cpu", 0))
    for name, value in options.items():
        monkeypatch.setenv(variable(name), str(value))
    before = torch.get_num_threads()
    row = device.line_row()
    torch.set_num_threads(before)
    assert row.text.startswith(text)
    assert (row.state, bool(row.hint)) == (state, state == "FAIL")


IMPORTS = """
import os
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.tools.probe import leave_outcome as main
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('noise'); raise ValueError('it broke')", {"error": "ended with exit code 1: ValueError: it broke"}),
        ("main(lambda: {'x': 1}); os._exit(7)", {"error": "ended with exit code 7: it printed nothing", "log": []}),
        ("def f(): raise SetupError('no card', hint='buy one')\nmain(f)", {"error": "no card", "hint": "buy one"}),
        ("print('noise'); main(lambda: {'x': 1})", {"x": 1}),
        ("main(lambda: MultiGPUConfig.resolve({}).plain_values())", {"num_gpus": 3, "grace_s": 7.0}),
    ],
)
def test_probe_turns_every_end_into_an_outcome(tmp_path, capfd, monkeypatch, code, expected):
    # The options of the user's folder, which is not that of a probe.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").write_text("[tool.unsloth_multigpu]\nnum_gpus = 3")
    (tmp_path / "mine" / "m.yaml").write_text("grace_s: 7")
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setenv("UNSLOTH_MULTIGPU_CONFIG", "m.yaml")
    (tmp_path / "a_probe.py").write_text(IMPORTS + code)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    outcome = run_probe("a_probe", tmp_path, 60.0, {"PYTHONPATH": path})
    assert {key: outcome[key] for key in expected} == expected
    assert capfd.readouterr() == ("", "")


def test_closed_pipe_is_no_error():
    code = (
        "import dataclasses, sys; from unsloth_multigpu.__main__ import COMMANDS, main; "
        "COMMANDS['top'] = dataclasses.replace(COMMANDS['top'], run=lambda *_: print('rank ' * 99999)); "
        "sys.exit(main(['top']))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 128 + signal.SIGPIPE)
