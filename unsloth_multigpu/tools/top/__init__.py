"""What is a running job doing now, rank by rank?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unsloth_multigpu.cli.command import Command


class TopCommand(Command):
    """`unsloth-multigpu top`."""

    name = "top"
    help = "watch a running job: steps, speed, waiting and memory of each rank"
    description = (
        "Shows a table of a job that runs on this machine, of a script or of a notebook, and ends when the job ends. "
        "Nothing is asked of the job: what its ranks write for their supervisor is read. Only your own jobs are seen."
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "run_name",
            nargs="?",
            metavar="RUN",
            help="Process id of the job, as `top` lists it where there are several, or of one of its ranks; or its "
            "private folder. [the one that runs]",
        )
        parser.add_argument("--once", action="store_true", help="Print one table and end. [a table that lives]")
        parser.add_argument("--json", action="store_true", help="Print one JSON object and end.")

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        from unsloth_multigpu.tools.top.top_command import run_top

        return run_top(options.run_name, once=options.once, as_json=options.json)


COMMAND = TopCommand()
