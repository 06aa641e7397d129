"""Is it the same training as on one process?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unsloth_multigpu.cli.command import Command, OptionTable
from unsloth_multigpu.options import command_options


class VerifyCommand(Command):
    """`unsloth-multigpu verify`."""

    name = "verify"
    help = "compare the first steps of a script on one process and on several ranks"
    description = (
        "Runs the script up to the first steps of its first train(), on one process and on several ranks, and compares "
        "samples, loss, gradient norm and what was added to the weights. The ranks also compute each step as one "
        "process does, from the same weights, and compare the gradients. The training saves nothing, what comes after "
        "it is not run; what the script does before it, it does twice. Exit code 0 = both agree, 77 = they do not, or "
        "too little could be compared; a script that fails ends it with the script's own code."
    )
    runs_program = True

    def table(self) -> OptionTable:
        from unsloth_multigpu.tools.verify.verify_command import VerifyOptions

        return {**VerifyOptions.table(), **command_options("verify")}

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        from unsloth_multigpu.tools.verify.verify_command import run_verify

        return run_verify(options, program)


COMMAND = VerifyCommand()
