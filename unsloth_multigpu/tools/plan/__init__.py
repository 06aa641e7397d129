"""How many GPUs does a script need, and should it be sharded?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unsloth_multigpu.cli.command import Command, OptionTable


class PlanCommand(Command):
    """`unsloth-multigpu plan`."""

    name = "plan"
    help = "forecast the memory of a script on several numbers of GPUs, without loading weights"
    description = (
        "Runs the script up to its first train(), with a model that has shapes and no weights, and prints what each "
        "rank would need: with DDP, where every rank has the whole model, and sharded by FSDP2. What the script does "
        "before train(), such as tokenising, it does. Exit code 0 = a row fits, 69 = none does, or nothing could be "
        "forecast."
    )
    runs_program = True

    def table(self) -> OptionTable:
        from unsloth_multigpu.tools.plan.plan_command import PlanOptions

        return PlanOptions.table()

    def program_of(self, options: argparse.Namespace) -> list[str]:
        from unsloth_multigpu.tools.plan.plan_command import program_of_model

        return program_of_model(options)

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        from unsloth_multigpu.tools.plan.plan_command import run_plan

        return run_plan(options, program)


COMMAND = PlanCommand()
