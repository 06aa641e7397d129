"""What has this machine, and does it work?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unsloth_multigpu.cli.command import Command
from unsloth_multigpu.options import MultiGPUConfig


class DoctorCommand(Command):
    """`unsloth-multigpu doctor`."""

    name = "doctor"
    help = "check versions, devices, copies between GPUs, an all-reduce and the patches"
    description = (
        "Checks this machine, and says in the last line what a script with enable_multi_gpu() would run on. Exit code "
        "0 = ready to train, 1 = something failed."
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds its options to its parser."""
        output = parser.add_mutually_exclusive_group()
        output.add_argument("--json", action="store_true", help="print one JSON object")
        output.add_argument("--seams", action="store_true", help="print only the table of patches, as Markdown")
        output.add_argument("--options", action="store_true", help="print only the table of options, as Markdown")
        output.add_argument("--verbose", action="store_true", help="list the patches that are as tested, too")
        parser.add_argument("--num-gpus", type=int, metavar="N", help="ranks of the all-reduce [all; 2 without a GPU]")
        parser.add_argument(
            "--timeout-s", type=float, metavar="SECONDS", default=120.0, help="limit of each check [120]"
        )

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        from unsloth_multigpu.tools.doctor.command import run_doctor
        from unsloth_multigpu.tools.doctor.options import options_markdown
        from unsloth_multigpu.tools.doctor.seam import seams_markdown

        if options.options:
            print(options_markdown(), end="")
            return 0
        if options.seams:
            print(seams_markdown(), end="")
            return 0
        # The same rules as for the options of a run.
        MultiGPUConfig.resolve({"num_gpus": options.num_gpus, "timeout_s": options.timeout_s}, {})
        return run_doctor(options.num_gpus, as_json=options.json, limit_s=options.timeout_s, is_verbose=options.verbose)


COMMAND = DoctorCommand()
