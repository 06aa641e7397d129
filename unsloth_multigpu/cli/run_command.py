"""`unsloth-multigpu run`: runs a script as if its first line were `enable_multi_gpu()`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from unsloth_multigpu.cli.command import Arguments, Command
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.options import ENV_CONFIG, MultiGPUConfig, variable
from unsloth_multigpu.tool import tool_of
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import read_identity

RANK_MODULE = "unsloth_multigpu.cli.script_runner"


@dataclass(frozen=True)
class Options(Arguments):
    """Runs a script as if its first line were enable_multi_gpu(). Each option is also the variable
    UNSLOTH_MULTIGPU_<NAME>; docs/options.md describes each.

    Args:
        config: YAML file with options, one `name: value` per line; also the variable UNSLOTH_MULTIGPU_CONFIG. Options
            on the command line and variables override it.
    """

    config: Annotated[str | None, Option(shown="FILE")] = None


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> NoReturn:
    """Becomes the supervisor of the ranks of `program`, or its only process."""
    from unsloth_multigpu.logs import Console
    from unsloth_multigpu.start import check_cluster, needs_supervisor, ranks_to_start, supervise

    if own.config is not None:
        # The absolute path, because the script may change the working folder before enable_multi_gpu().
        os.environ[ENV_CONFIG] = os.path.abspath(own.config)
    config = tool_of(RunContext.read(os.environ)).adjusted(MultiGPUConfig.resolve(given))
    # As variables, so that enable_multi_gpu() in the script has the same options.
    os.environ.update({variable(name): str(value) for name, value in given.items() if value is not None})
    command = [sys.executable, "-m", RANK_MODULE, *program]
    Console()
    is_rank = read_identity(os.environ) is not None  # Started by torchrun or srun.
    if not is_rank:
        check_cluster(config)
    # Counting the devices imports torch, so it is left to the rank if there can be only one.
    if not is_rank and (config.num_gpus != 1 or needs_supervisor(config, 1)):
        num_ranks = ranks_to_start(config)
        if needs_supervisor(config, num_ranks):
            supervise(command, config, num_ranks)
    for stream in (sys.stdout, sys.stderr):
        print(end="", file=stream, flush=True)  # `file=None` is allowed: the command may have no stdout.
    os.execv(command[0], command)


COMMAND = Command(
    "run",
    "run a script without enable_multi_gpu() on every GPU",
    Options,
    run,
    runs_program=True,
    has_options_of_run=True,
)
