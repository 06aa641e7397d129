"""What has this machine, and does it work?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unsloth_multigpu.cli.command import Command, OptionTable
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import CommandOption
from unsloth_multigpu.options import MultiGPUConfig

_LIMIT_S = 120.0


class DoctorCommand(Command):
    """`unsloth-multigpu doctor`."""

    name = "doctor"
    help = "check versions, devices, copies between GPUs, an all-reduce and the patches"
    description = (
        "Checks this machine, and says in the last line what a script with enable_multi_gpu() would run on. Exit code "
        "0 = ready to train, 1 = something failed."
    )

    def table(self) -> OptionTable:
        return {
            "json": (bool, "Print one JSON object."),
            "seams": (bool, "Print only the table of patches, as Markdown."),
            "options": (bool, "Print only the table of options, as Markdown."),
            "num_gpus": CommandOption(int, "Ranks of the all-reduce. [all; 2 without a GPU]", "N"),
            "timeout_s": CommandOption(float, f"Limit of each check. [{_LIMIT_S:g}]", "SECONDS"),
        }

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        from unsloth_multigpu.tools.doctor.doctor_command import run_doctor
        from unsloth_multigpu.tools.doctor.options_page import options_markdown
        from unsloth_multigpu.tools.doctor.seam_page import seams_markdown

        asked = [name for name in ("json", "seams", "options") if getattr(options, name)]
        if len(asked) > 1:
            raise ConfigError(f"--{asked[0]} and --{asked[1]} print different things.", hint="Give one of them.")
        if options.options or options.seams:
            print(options_markdown() if options.options else seams_markdown(), end="")
            return 0
        limit_s = _LIMIT_S if options.timeout_s is None else options.timeout_s
        # The same rules as for the options of a run.
        MultiGPUConfig.resolve({"num_gpus": options.num_gpus, "timeout_s": limit_s}, {})
        return run_doctor(options.num_gpus, as_json=options.json, limit_s=limit_s)


COMMAND = DoctorCommand()
