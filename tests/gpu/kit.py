"""Measures on this machine's cards everything that docs/benchmarks.md says of GPUs: `python -m tests.gpu.kit --part 1`.

A part is one call of at most nine minutes, and needs no network. Every step has a limit of its own and is recorded in
one JSON file as soon as it ends; one that fails leaves the others alone, and makes the exit code 1. A part that is
called again does what has not passed. `python -m tests.gpu.page FILE` writes the figures into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.step import PART_LIMIT_S, PARTS, Step, place_ranks, short_result, steps_of
from unsloth_multigpu.wire.child import run_to_end

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_OUT = ROOT / "build" / "gpu" / "result.json"
# Below that a step is not begun.
LEAST_S = 15.0
# What launchers need to end their ranks.
END_LIMIT_S = 10.0
TAIL_LINES = 25
# CPU ranks in their place.
REHEARSED_CARDS = 2
LOOK = """
import json, torch, torch.distributed as dist
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
memory = [torch.cuda.get_device_properties(i).total_memory for i in range(len(names))]
nccl = torch.cuda.nccl.version() if dist.is_available() and dist.is_nccl_available() else None
versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}
print(json.dumps({"cards": names, "memory_bytes": memory, **versions}))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    steps = steps_of(options.device, is_tiny=options.tiny)
    if options.list:
        print("\n".join(f"{s.part}  {s.name:<16} {s.limit_s:>4} s  {s.num_cards}+ card(s)  {s.text}" for s in steps))
        return 0
    machine = look_at_machine(options)
    chosen = choose(steps, options.part, options.steps)
    record = open_record(options.out, machine)
    deadline_s = time.monotonic() + options.limit_s
    with tempfile.TemporaryDirectory(prefix="gpu_kit_cache_") as options.cache:
        run_steps(chosen, options, record, deadline_s)
    failed = [step.name for step in chosen if not has_passed(record["steps"][step.name])]
    print(f"{options.out}: {len(chosen) - len(failed)} of {len(chosen)} steps passed or are left out", flush=True)
    if failed:
        print(f"not passed: {' '.join(failed)}", flush=True)
    return 1 if failed else 0


def run_steps(chosen: Sequence[Step], options: argparse.Namespace, record: dict[str, Any], deadline_s: float) -> None:
    """Runs those that have not passed, and those that were named; each is recorded as soon as it ends."""
    for step in chosen:
        missing, note = place_step(step, record["machine"])
        if missing:
            outcome: dict[str, Any] = {"skipped": missing}
        elif not options.steps and has_passed(before := record["steps"].get(step.name)) and "skipped" not in before:
            print(f"== {step.name}: passed before", flush=True)
            continue
        else:
            print(f"== {step.name} (part {step.part}, at most {step.limit_s} s): {step.text}", flush=True)
            outcome = {"note": note, **run_step(step, options, deadline_s)}
        record["steps"][step.name] = {"part": step.part, "text": step.text, **outcome}
        write_record(options.out, record)
        if options.pack is not None:
            pack(options.out, options.pack)
        print(f"   {said(outcome)}", flush=True)


def place_step(step: Step, machine: Mapping[str, Any]) -> tuple[str, str]:
    """Why the step is left out, "" = it is not; and what its result has to say of where its ranks ran."""
    is_rehearsal = machine["device"] == "cpu"
    num_cards = REHEARSED_CARDS if is_rehearsal else len(machine["cards"])
    if step.num_cards > num_cards:
        return f"needs {step.num_cards} cards, {num_cards} visible", ""
    if is_rehearsal:
        return "", ""
    place = place_ranks(step.num_ranks, num_cards, machine["nccl"])
    return (place.note, "") if step.only_nccl and place.backend != "nccl" else ("", place.note)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit", description=__doc__.split("\n\n")[0])
    parts = "; ".join(f"{number}: {text}" for number, text in PARTS.items())
    parser.add_argument("steps", nargs="*", metavar="STEP", help="steps by name, also those that have passed")
    parser.add_argument("--part", type=int, choices=PARTS, action="append", help=f"[all] {parts}")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help="[build/gpu/result.json]")
    parser.add_argument("--limit-s", type=float, metavar="S", help=f"of the call [{PART_LIMIT_S}, without a part none]")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: a rehearsal, whose figures say nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --tiny only")
    parser.add_argument("--site", type=Path, metavar="DIR", help="a folder of packages that this Python lacks")
    parser.add_argument(
        "--pack", type=Path, metavar="FILE", help="a .tgz of the results and logs so far, written after each step"
    )
    parser.add_argument("--list", action="store_true", help="name the steps and end")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not (options.tiny or options.list):
        parser.error("--device cpu is for a rehearsal: give --tiny as well")
    if options.limit_s is None:
        options.limit_s = PART_LIMIT_S if options.part else float("inf")
    options.cache = None
    options.out = options.out.resolve()
    return options


def choose(steps: Sequence[Step], parts: Sequence[int] | None, names: Sequence[str]) -> list[Step]:
    """The steps of these parts, or those that are named."""
    if unknown := set(names) - {step.name for step in steps}:
        sys.exit(f"no such step: {' '.join(sorted(unknown))}; see --list")
    if names:
        return [step for step in steps if step.name in names]
    return [step for step in steps if parts is None or step.part in parts]


def look_at_machine(options: argparse.Namespace) -> dict[str, Any]:
    """Cards and versions. This process never imports torch: steps are to find the cards as they were."""
    run = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=False, env=environment(options, None, {})
    )
    if run.returncode:
        sys.exit(f"torch does not work here:\n{run.stderr[-2000:]}")
    machine: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    if options.device == "cuda" and not machine["cards"]:
        sys.exit("No GPU is visible to torch, and this measures one. A rehearsal without: make gpu TINY=1")
    return {**machine, "device": options.device, "is_tiny": options.tiny}


def open_record(path: Path, machine: Mapping[str, Any]) -> dict[str, Any]:
    """What was recorded on this machine so far."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return {"machine": dict(machine), "commit": commit(), "steps": {}}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record["machine"] != machine:
        sys.exit(f"{path} is of {record['machine']}, and this is {dict(machine)}. Give another --out.")
    return record


def commit() -> str:
    """The commit that is measured, "" in a tree without git."""
    try:
        run = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return run.stdout.strip()


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """As a whole or not at all."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def pack(record: Path, archive: Path) -> None:
    """Puts the record and the logs beside it into an archive. As a whole or not at all: the call may be cut off."""
    draft = archive.with_suffix(".part")
    with tarfile.open(draft, "w:gz") as tar:
        for file in (record, *sorted(record.parent.glob("*.log"))):
            tar.add(file, file.name)
    draft.replace(archive)


def has_passed(outcome: Mapping[str, Any] | None) -> bool:
    """True also for what was left out."""
    return outcome is not None and ("skipped" in outcome or (outcome.get("rc") == 0 and not outcome["problems"]))


def said(outcome: Mapping[str, Any]) -> str:
    if "skipped" in outcome:
        return f"left out: {outcome['skipped']}"
    if outcome["rc"] is None:
        return outcome["problems"][0]
    return f"rc={outcome['rc']} in {outcome['seconds']} s{''.join(f'; {p}' for p in outcome['problems'])}"


def environment(options: argparse.Namespace, step: Step | None, own: Mapping[str, str]) -> dict[str, str]:
    """Variables of a step: nothing is downloaded, no cache of the user's is read, and none is left."""
    path = [str(ROOT), *([str(options.site.resolve())] if options.site else []), os.environ.get("PYTHONPATH", "")]
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("UNSLOTH_MULTIGPU_")},
        **{"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"},
        **{"UNSLOTH_DISABLE_STATISTICS": "1", "PYTHONUNBUFFERED": "1"},
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "GPU_KIT_DEVICE": options.device,
        "GPU_KIT_TINY": str(int(options.tiny)),
        **own,
    }
    if options.cache is not None:
        # What one step has compiled the next ones find.
        caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        variables |= {name: os.path.join(options.cache, folder) for name, folder in caches.items()}
    # Where packages were unpacked and not compiled, each of a step's processes would compile them again.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    if options.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif step is not None and step.only_cards is not None:
        given = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(step.only_cards))))
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(given.split(",")[: step.only_cards])
    return variables


def run_step(step: Step, options: argparse.Namespace, deadline_s: float) -> dict[str, Any]:
    """Runs it; its output goes to a file beside the record, its result and the end of a failure into the record."""
    limit_s = min(step.limit_s * (2 if options.tiny else 1), deadline_s - time.monotonic() - END_LIMIT_S)
    if limit_s < LEAST_S:
        return {"rc": None, "seconds": 0.0, "problems": ["no time left; call the part again"]}
    log = options.out.parent / f"{step.name}.log"
    log.unlink(missing_ok=True)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_kit_", ignore_cleanup_errors=True) as root:
        file = Path(root, "facts.json")
        own = {"GPU_KIT_FACTS": str(file), **{name: root for name in ("TMPDIR", "HF_HOME", "HF_DATASETS_CACHE")}}
        command = [sys.executable, *step.command]
        # pytest looks for its settings from the folder in which it is started.
        folder = ROOT if "pytest" in command else Path(root)
        rc = run_to_end(
            command,
            environment(options, step, own),
            log,
            marker=root,
            limit_s=limit_s,
            terminate_limit_s=END_LIMIT_S,
            cwd=folder,
        )
        text = log.read_text(encoding="utf-8", errors="replace")
        problems = ["ended by its limit"] if rc is None else [f"exit code {rc}"] if rc else []
        result = None
        if step.prints or file.exists():
            try:
                result = short_result(json.loads(text[f"\n{text}".index("\n{") :] if step.prints else file.read_text()))
                problems += step.judge(result)
            except (ValueError, KeyError, TypeError) as error:
                problems.append(f"its result cannot be read: {type(error).__name__}: {error}")
    reason = skipped_reason(text) if "pytest" in step.command and not problems else ""
    if reason:
        return {"skipped": reason}
    outcome = {
        "rc": 124 if rc is None else rc,
        "seconds": round(time.monotonic() - begin_s, 1),
        "limit_s": round(limit_s),
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "problems": problems,
        "last_line": (text.splitlines() or [""])[-1],
        "result": result,
    }
    return {**outcome, "tail": text.splitlines()[-TAIL_LINES:]} if problems else outcome


def skipped_reason(text: str) -> str:
    """Why pytest has skipped all tests, from its output with `-rs`; "" = some have run."""
    lines = text.splitlines()
    if not lines or " passed" in lines[-1]:
        return ""
    reasons = dict.fromkeys(line.partition(": ")[2] for line in lines if line.startswith("SKIPPED "))
    return f"all tests skipped: {'; '.join(reasons)}"


if __name__ == "__main__":
    sys.exit(main())
