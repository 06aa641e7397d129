"""Runs a script as a user does, and looks for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# CPU ranks everywhere: tests/gpu asks for cards itself.
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
# Its sitecustomize.py takes two fifths of the time off a start, and does not change what a script does.
SITE = str(ROOT / "tests" / "helpers" / "light")


def hide(*modules: str) -> dict[str, str]:
    """Environment of a script that needs none of `modules`, which others import only because they are installed."""
    return {"HIDDEN_MODULES": ",".join(modules)}


def light(*modules: str) -> dict[str, str]:
    """Without what no test needs, a third of the time that importing transformers' Trainer takes, and `modules`."""
    return hide("bitsandbytes", "scipy", "sklearn", "torchao", *modules)


def light_with_bits(*modules: str) -> dict[str, str]:
    """The same for a script that needs bitsandbytes."""
    return hide("scipy", "sklearn", "torchao", *modules)


LIGHT = light()
# For a script that trains a model of transformers, and an adapter of PEFT.
PLAIN = light("datasets", "rich", "triton")
# A quarter of what is left, for a script that needs no library beside transformers.
BARE = light("datasets", "peft", "rich", "triton")


def environment_with(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """All variables of a started Python: one thread for each rank, and nothing of what this process was told."""
    # Compiled modules are kept: else each process would compile this package's.
    own = {k: v for k, v in os.environ.items() if not k.startswith(("UNSLOTH_MULTIGPU_", "PYTHONDONTWRITE"))}
    all_of_them = {**own, **QUIET, **ON_CPU, "OMP_NUM_THREADS": "1", **(env or {})}
    # Last: a test may have a sitecustomize of its own.
    path = os.pathsep.join(filter(None, [all_of_them.get("PYTHONPATH"), SITE]))
    return {**all_of_them, "PYTHONPATH": path}


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its exit code (negative = signal), what it printed, and for how long it ran."""

    code: int
    out: str
    err: str
    seconds: float


def start(
    arguments: Sequence[str | os.PathLike[str]], cwd: Path, env: Mapping[str, str] | None = None, **options
) -> subprocess.Popen:
    """Starts `python arguments...` in `cwd` with `environment_with(env)`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=environment_with(env), **{**pipes, **options})


def finish(process: subprocess.Popen, timeout_s: float = 600.0) -> Finished:
    """Waits for the end. One that does not come within the limit is a failure, not a hang of the test."""
    begin = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"not finished within {timeout_s} s\n{out}\n{err}") from None
    return Finished(process.returncode, out or "", err or "", time.monotonic() - begin)


def run_python(
    arguments: Sequence[str | os.PathLike[str]], cwd: Path, env: Mapping[str, str] | None = None
) -> Finished:
    """Starts and waits."""
    return finish(start(arguments, cwd, env))


def run_well(arguments: Sequence[str | os.PathLike[str]], cwd: Path, env: Mapping[str, str] | None = None) -> Finished:
    """`run_python` of what has to end with exit code 0."""
    run = run_python(arguments, cwd, env)
    assert run.code == 0, f"exit code {run.code}\n{run.out}{run.err}"
    return run


def run_command(*arguments: object, folder: Path, env: Mapping[str, str]) -> Finished:
    """`unsloth-multigpu arguments...` in a folder, with temporary files in its `scratch`. It leaves nothing behind."""
    scratch = folder / "scratch"
    scratch.mkdir()
    command = ["-m", "unsloth_multigpu", *map(str, arguments)]
    run = run_python(command, folder, {**env, "TMPDIR": str(scratch)})
    assert [path.name for path in scratch.glob("unsloth_multigpu*")] == [], run.err
    assert orphans(str(folder)) == []
    return run


def free_port() -> int:
    """Of this machine. It is below those that Linux gives to connections, so that only a test's choice can take it."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def orphans(marker: str) -> list[int]:
    """Living processes whose command line has `marker`: what a run must not leave behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marker in command and state not in "ZX":
                found.append(int(entry.name))
    return found


def wait_until(condition, timeout_s: float, what: str) -> float:
    """Polls until `condition()`; returns the seconds it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, f"{what} not within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - begin
