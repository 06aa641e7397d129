"""`unsloth-multigpu verify`: compares the first steps of a script on one process and on several ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from unsloth_multigpu.cli.command import Arguments, Command
from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.errors import ConfigError, DivergenceError, SetupError
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.options import MultiGPUConfig, variable
from unsloth_multigpu.tools.script_program import DEFAULT_LIMIT_S, check_is_no_rank, run_first_steps, thread_variables
from unsloth_multigpu.wire.child import exit_on_signal
from unsloth_multigpu.wire.run import private_dir


@dataclass(frozen=True)
class Options(Arguments):
    """Runs the script up to the first steps of its first train(), on one process and on several ranks, and compares
    samples, loss, gradient norm and changes of the weights. The ranks also compute each step as one process does, from
    the same weights, and compare the gradients. The training saves nothing, and the rest of the script is not run; the
    code before train() is run twice. Exit code 0 = both agree, 77 = they differ, or too little could be compared; if
    the script fails, its own exit code.

    Args:
        num_gpus: Ranks that are compared with one process.
        steps: Optimizer steps that are compared.
        no_dropout: Switch dropout off in both runs.
        json: Print one JSON object, the receipt.
        timeout_s: Limit of each of the two runs, in seconds.
    """

    num_gpus: Annotated[int | None, Option(least=1, otherwise="all visible GPUs; 2 CPU ranks without one")] = None
    steps: Annotated[int, Option(least=1)] = 5
    no_dropout: Annotated[bool, Option()] = False
    json: Annotated[bool, Option()] = False
    timeout_s: Annotated[float, Option(least=1, shown="SECONDS")] = DEFAULT_LIMIT_S


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> int:
    """Runs the first steps of `program` twice, and prints the comparison.

    Returns:
        0 if both runs agree, the exit code of `DivergenceError` if they differ, that of the script if it failed.

    Raises:
        ConfigError: An invalid number of steps or ranks.
        SetupError: More ranks than GPUs, or the script has no training that can be recorded.
        RankTimeoutError: A run took longer than `own.timeout_s`.
    """
    config = MultiGPUConfig.resolve({**given, "num_gpus": own.num_gpus})
    num_ranks = _num_ranks(config)
    threads = thread_variables(config.device, num_ranks)
    variables = {variable(name): str(value) for name, value in given.items() if value is not None} | threads
    runs = []
    with private_dir() as folder, exit_on_signal(), Progress("verify") as progress:
        for name, num_gpus in (("one", 1), ("many", num_ranks)):
            begin_s = time.monotonic()
            label = f"{own.steps} steps on {'one process' if num_gpus == 1 else f'{num_gpus} ranks'}"
            progress.show(label)
            asked = {"folder": str(folder / name), "num_steps": own.steps, "num_gpus": num_gpus}
            asked["dropout"] = not own.no_dropout
            code, records, tail = run_first_steps("verify", program, asked, config.device, variables, own.timeout_s)
            progress.clear()
            if code != 0:
                Screen(sys.stderr).line(tail)
                progress.say(f"{label} ended with exit code {code}.")
                return code
            if not records[0]["steps"]:
                raise SetupError("The training ended before its first step.", hint="Check max_steps and the data.")
            runs.append(records)
            progress.say(f"{label} took {time.monotonic() - begin_s:.1f} s with start-up")
    from unsloth_multigpu.tools.verify.receipt import make_receipt, merged, show  # Imports torch.

    receipt = make_receipt(program, *map(merged, runs))
    screen = Screen()
    if own.json:
        screen.json(receipt)
    else:
        show(screen, receipt, threads.get("OMP_NUM_THREADS"))
    return 0 if receipt["agree"] else DivergenceError.exit_code


COMMAND = Command(
    "verify", "compare the first steps of a script on one process and on several ranks", Options, run, runs_program=True
)


def _num_ranks(config: MultiGPUConfig) -> int:
    from unsloth_multigpu.start import ranks_to_start
    from unsloth_multigpu.tools.allreduce import with_several_ranks

    check_is_no_rank("verify")
    num_ranks = ranks_to_start(with_several_ranks(config))
    if num_ranks == 1 and config.enable_ddp:  # Without DDP, the first run tells it.
        raise ConfigError(
            "verify compares one process with several ranks; this would be one rank.",
            hint="Set --num-gpus 2, and with one GPU --device cpu.",
        )
    return num_ranks
