"""How fast is a training on several ranks?"""

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "bench",
    "measure one process, this package, torchrun and others side by side",
    "Trains a random Llama in several ways, one after the other, and compares speed, waiting, memory, gradients "
    "and bytes sent. Exit code 0 = measured, 1 = an arm failed.",
    "unsloth_multigpu.tools.bench.bench_command",
)
