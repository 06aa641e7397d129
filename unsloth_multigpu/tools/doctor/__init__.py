"""What has this machine, and does it work?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from unsloth_multigpu.cli.command import Arguments, Command, OptionTable
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.option_type import Option


@dataclass(frozen=True)
class DoctorOptions(Arguments):
    """Options of `unsloth-multigpu doctor`.

    Args:
        json: Print one JSON object.
        seams: Print only the table of patches, as Markdown.
        options: Print only the table of options, as Markdown.
        num_gpus: Ranks of the all-reduce.
        timeout_s: Limit of each check.
    """

    json: Annotated[bool, Option()] = False
    seams: Annotated[bool, Option()] = False
    options: Annotated[bool, Option()] = False
    num_gpus: Annotated[int | None, Option(least=1, otherwise="all; 2 without a GPU")] = None
    timeout_s: Annotated[float, Option(least=1, shown="SECONDS")] = 120.0


class DoctorCommand(Command):
    """`unsloth-multigpu doctor`."""

    name = "doctor"
    help = "check versions, devices, copies between GPUs, an all-reduce and the patches"
    description = (
        "Checks this machine, and says in the last line what a script with enable_multi_gpu() would run on. Exit code "
        "0 = ready to train, 1 = something failed."
    )

    def table(self) -> OptionTable:
        return DoctorOptions.table()

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        from unsloth_multigpu.tools.doctor.doctor_command import run_doctor
        from unsloth_multigpu.tools.doctor.options_page import options_markdown
        from unsloth_multigpu.tools.doctor.seam_page import seams_markdown

        given = DoctorOptions.read(options)
        asked = [name for name in ("json", "seams", "options") if getattr(given, name)]
        if len(asked) > 1:
            raise ConfigError(f"--{asked[0]} and --{asked[1]} print different things.", hint="Give one of them.")
        if given.options or given.seams:
            print(options_markdown() if given.options else seams_markdown(), end="")
            return 0
        return run_doctor(given.num_gpus, as_json=given.json, limit_s=given.timeout_s)


COMMAND = DoctorCommand()
