"""How long would a script take on N GPUs, and what limits it?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unsloth_multigpu.cli.command import Command, OptionTable


class ForecastCommand(Command):
    """`unsloth-multigpu forecast`."""

    name = "forecast"
    help = "forecast the time of a script on several GPUs from some steps on one"
    description = (
        "Runs the script up to the first steps of its first train() on one rank, and prints how long the training "
        "would take on other numbers of GPUs, how much of it is waiting and sending, up to how many GPUs are useful, "
        "and what to change. The training saves nothing, what comes after it is not run. Exit code 0 = there is a "
        "forecast, 69 = there is none."
    )
    runs_program = True

    def table(self) -> OptionTable:
        from unsloth_multigpu.tools.forecast.forecast_command import ForecastOptions

        return ForecastOptions.table()

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        from unsloth_multigpu.tools.forecast.forecast_command import run_forecast

        return run_forecast(options, program)


COMMAND = ForecastCommand()
