"""How fast is it?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from unsloth_multigpu.cli.command import Command, OptionTable


class BenchCommand(Command):
    """`unsloth-multigpu bench`."""

    name = "bench"
    help = "measure one process, this package, torchrun and others side by side"
    description = (
        "Trains a random Llama in several ways, one after the other, and compares speed, waiting, memory, gradients "
        "and what is sent. Exit code 0 = measured, 1 = an arm failed."
    )

    def table(self) -> OptionTable:
        from unsloth_multigpu.tools.bench.bench_command import bench_table

        return bench_table()

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        from unsloth_multigpu.tools.bench.bench_command import run_bench

        return run_bench(options)


COMMAND = BenchCommand()
