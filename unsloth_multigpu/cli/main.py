"""The command `unsloth-multigpu`: starts scripts that have no line of their own, and checks the machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from unsloth_multigpu.cli.bench_parser import add_bench_options
from unsloth_multigpu.errors import ConfigError, MultiGPUError
from unsloth_multigpu.launch.identity import read_identity
from unsloth_multigpu.options import MultiGPUConfig, command_options, variable
from unsloth_multigpu.row import flag
from unsloth_multigpu.versions import installed_version

RANK_MODULE = "unsloth_multigpu.cli.script"
_USAGES = {
    command: f"""unsloth-multigpu {command} [options] [--] train.py [arguments of train.py ...]
       unsloth-multigpu {command} [options] -m package.module [arguments of the module ...]"""
    for command in ("run", "verify", "chaos")
}


def main(argv: Sequence[str] | None = None) -> int | None:
    """Runs one command line and returns its exit code; `run` does not return.

    Args:
        argv: Arguments without the program's name; None = `sys.argv[1:]`.
    """
    own, behind, program = split_program(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    options, unknown = parser.parse_known_args([*own, *behind])
    try:
        if unknown:
            hint = f"unsloth-multigpu {options.command} --help lists what there is."
            raise ConfigError(f"{options.command}: unrecognized arguments: {' '.join(unknown)}", hint=hint)
        if options.command == "doctor":
            return _doctor(options)
        if options.command == "bench":
            from unsloth_multigpu.cli.bench import run_bench

            return run_bench(options)
        if options.command == "verify":
            from unsloth_multigpu.cli.verify import run_verify

            _check_program(program, "verify")
            _check_behind(own, behind)
            return run_verify(options, program)
        if options.command == "chaos":
            from unsloth_multigpu.cli.chaos import run_chaos

            _check_program(program, "chaos")
            return run_chaos(options, program)
        _check_program(program, "run")
        _run(options, program)
    except MultiGPUError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Parts the options of a command from the program: from the script's name on all belongs to the script.

    Returns options that stand before it, options that stand directly behind its name, and the program.

    `verify` also takes options of its own directly after the name, up to the first that it does not know, unless `--`
    stands before the name. Not left to argparse, which takes `-h` and `--` out of the script's arguments in some
    versions of Python.
    """
    tables = {"run": _run_options, "verify": _verify_options, "chaos": _chaos_options}
    if not arguments or arguments[0] not in tables:
        return list(arguments), [], []
    is_verify, table = arguments[0] == "verify", tables[arguments[0]]()
    take_value = {flag(name) for name, (kind, _) in table.items() if kind is not bool}
    i = 1
    while i < len(arguments) and arguments[i].startswith("-") and arguments[i] not in ("-m", "--"):
        i += 2 if arguments[i] in take_value else 1
    own, program = list(arguments[:i]), list(arguments[i:])
    if program[:1] == ["--"]:
        return own, [], program[1:]
    if not is_verify:
        return own, [], program
    switches = {switch for name, (kind, _) in table.items() if kind is bool for switch in _switches(name)}
    start = end = 2 if program[:1] == ["-m"] else 1
    while end < len(program) and (program[end] in switches or program[end].split("=")[0] in take_value):
        end += 2 if program[end] in take_value else 1
    return own, program[start:end], [*program[:start], *program[end:]]


def _check_behind(own: Sequence[str], behind: Sequence[str]) -> None:
    """What stands behind a script may be meant for the script."""
    before, after = ({_bare(argument) for argument in part if argument.startswith("--")} for part in (own, behind))
    if both := sorted(before & after):
        raise ConfigError(
            f"verify: {both[0]} is given before and behind the script.",
            hint="Give it once; after `--` before the script, all that follows is the script's own.",
        )
    if behind:
        print(f"verify: takes {' '.join(behind)}; put `--` before the script where it is meant for it", file=sys.stderr)


def _bare(argument: str) -> str:
    return argument.split("=")[0].replace("--no-", "--", 1)


def _switches(name: str) -> list[str]:
    # `--dropout` without `--no-` is left to scripts, many of which have it.
    return [flag(name)] if name.startswith("no_") else [flag(name), flag(f"no_{name}")]


def _run_options() -> dict[str, tuple[type[Any], str]]:
    return command_options("run")


def _verify_options() -> dict[str, tuple[type[Any], str]]:
    from unsloth_multigpu.cli.verify import OWN_OPTIONS

    return {**OWN_OPTIONS, **command_options("verify")}


def _chaos_options() -> dict[str, tuple[type[Any], str]]:
    from unsloth_multigpu.cli.chaos import DEFAULTS, OWN_OPTIONS

    return {**OWN_OPTIONS, **command_options("chaos", DEFAULTS)}


class _Parser(argparse.ArgumentParser):
    """Ends a wrong command line as this package ends a wrong argument: with the exit code of ConfigError."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ConfigError.exit_code, f"error: {message}\nHint: {self.prog} --help lists what there is.\n")


def _parser() -> _Parser:
    parser = _Parser(prog="unsloth-multigpu", description="One-GPU training scripts on every GPU.", allow_abbrev=False)
    version = installed_version("unsloth-multigpu") or "(not installed)"
    parser.add_argument("--version", action="version", version=f"unsloth-multigpu {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{run,doctor,verify,bench,chaos}")
    run = commands.add_parser(
        "run",
        help="run a script that has no line of its own on every GPU",
        usage=_USAGES["run"],
        description="Runs a script as if its first line were enable_multi_gpu(). Each option is also the variable "
        "UNSLOTH_MULTIGPU_<NAME>; `unsloth-multigpu doctor --options` says all about each.",
        allow_abbrev=False,
    )
    _add_options(run, _run_options())
    verify = commands.add_parser(
        "verify",
        help="compare the first steps of a script on one process and on several ranks",
        usage=_USAGES["verify"],
        description="Runs the script up to the first steps of its first train(), on one process and on several ranks, "
        "and compares samples, loss, gradient norm and what was added to the weights. The training saves nothing, what "
        "comes after it is not run; what the script does before it, it does twice. Exit code 0 = both agree, 77 = they "
        "do not, or too little could be compared; a script that fails ends it with the script's own code. Options may "
        "also stand right after the script, up to the first that is not one of these; after `--` all that follows the "
        "script is its own.",
        allow_abbrev=False,
    )
    _add_options(verify, _verify_options())
    doctor = commands.add_parser(
        "doctor",
        help="check versions, devices, copies between GPUs, an all-reduce and the patches",
        description="Checks this machine; exit code 0 = ready to train, 1 = something failed.",
        allow_abbrev=False,
    )
    output = doctor.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--seams", action="store_true", help="print only the table of patches, as Markdown")
    output.add_argument("--options", action="store_true", help="print only the table of options, as Markdown")
    doctor.add_argument("--num-gpus", type=int, metavar="INT", help="ranks of the all-reduce [all; 2 without a GPU]")
    doctor.add_argument("--timeout-s", type=float, metavar="FLOAT", default=120.0, help="limit of each check [120]")
    bench = commands.add_parser(
        "bench",
        help="measure one process, this package, torchrun and others side by side",
        description="Trains a random Llama in several ways, in turns, and compares speed, waiting, memory and "
        "gradients. With --strategies it compares ways in which gradients meet, on a text that the model learns; with "
        "--federated processes and threads that train federated clients. Exit code 0 = measured, 1 = an arm failed, "
        "77 = arms trained other weights.",
        allow_abbrev=False,
    )
    add_bench_options(bench)
    chaos = commands.add_parser(
        "chaos",
        help="kill, stop and starve ranks of a script, and see whether its training ends or goes on as it should",
        usage=_USAGES["chaos"],
        description="Runs the script once without faults and then with each, in a new folder, and compares what it "
        "says, how soon it ends, what it leaves behind, samples and weights. Exit code 0 = every run ended or went on "
        "as it should.",
        allow_abbrev=False,
    )
    _add_options(chaos, _chaos_options())
    return parser


def _add_options(parser: argparse.ArgumentParser, table: dict[str, tuple[type[Any], str]]) -> None:
    for name, (kind, text) in table.items():
        text = text.replace("%", "%%")
        if kind is bool:
            action = "store_true" if name.startswith("no_") else argparse.BooleanOptionalAction
            parser.add_argument(flag(name), action=action, help=text)
        else:
            parser.add_argument(flag(name), type=kind, metavar=kind.__name__.upper(), help=text)


def _doctor(options: argparse.Namespace) -> int:
    from unsloth_multigpu.cli.doctor import run_doctor
    from unsloth_multigpu.cli.options import options_markdown
    from unsloth_multigpu.cli.seam import seams_markdown

    if options.options:
        print(options_markdown(), end="")
        return 0
    if options.seams:
        print(seams_markdown(), end="")
        return 0
    # The same rules as for the options of a run.
    MultiGPUConfig.resolve({"num_gpus": options.num_gpus, "timeout_s": options.timeout_s}, {})
    return run_doctor(options.num_gpus, as_json=options.json, limit_s=options.timeout_s)


def _run(options: argparse.Namespace, program: Sequence[str]) -> NoReturn:
    from unsloth_multigpu.logs import Console
    from unsloth_multigpu.start import needs_supervisor, ranks_to_start, supervise

    given: dict[str, Any] = {name: getattr(options, name) for name in _run_options()}
    config = MultiGPUConfig.resolve(given)
    # By environment, so that a bare enable_multi_gpu() in the script asks for the same.
    os.environ.update({variable(name): str(value) for name, value in given.items() if value is not None})
    command = [sys.executable, "-m", RANK_MODULE, *program]
    Console(debug=config.debug)
    is_started = read_identity(os.environ) is not None  # By torchrun or srun: this process is one of the ranks.
    # Counting the devices takes an import of torch, so it is left to the rank where there can only be one.
    if not is_started and (config.num_gpus != 1 or needs_supervisor(config, 1)):
        num_ranks = ranks_to_start(config)
        if needs_supervisor(config, num_ranks):
            supervise(command, config, num_ranks)
    for stream in (sys.stdout, sys.stderr):
        print(end="", file=stream, flush=True)  # None where the command was started without it.
    os.execv(command[0], command)


def _check_program(program: Sequence[str], command: str) -> None:
    usage = f"usage: {_USAGES[command]}"
    if not program or (program[0] == "-m" and len(program) == 1):
        what = "module" if program else "script"
        raise ConfigError(f"{command}: no {what} was given.", hint=f"Name it after the options.\n{usage}")
    if program[0] != "-m" and not Path(program[0]).exists():
        raise ConfigError(f"{command}: there is no file {program[0]!r}.", hint=f"Check the path.\n{usage}")


if __name__ == "__main__":
    sys.exit(main())
