"""What does a fault do to a run?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unsloth_multigpu.cli.command import Command, OptionTable
from unsloth_multigpu.options import command_options


class ChaosCommand(Command):
    """`unsloth-multigpu chaos`."""

    name = "chaos"
    help = "kill, stop and starve ranks of a script, and see whether its training ends or continues as it should"
    description = (
        "Runs the script once without faults and then with each, and compares what it says, how soon it ends, what it "
        "leaves behind, samples and weights. It runs in this folder; checkpoints and logs of its Trainers go to a "
        "folder of each run, and nothing is uploaded. What the script saves itself it saves again in each run: {run} "
        "in its arguments stands for a new folder. Exit code 0 = every run ended or went on as it should."
    )
    runs_program = True

    def table(self) -> OptionTable:
        from unsloth_multigpu.tools.chaos.chaos_command import DEFAULTS, ChaosOptions

        return {**ChaosOptions.table(), **command_options("chaos", DEFAULTS)}

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        from unsloth_multigpu.tools.chaos.chaos_command import run_chaos

        return run_chaos(options, program)


COMMAND = ChaosCommand()
