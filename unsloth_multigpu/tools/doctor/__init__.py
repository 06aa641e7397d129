"""What has this machine, and does it work?"""

from __future__ import annotations

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "doctor",
    "check versions, devices, copies between GPUs, an all-reduce and the patches",
    "Checks this machine, and says in the last line what a script with enable_multi_gpu() would run on. Exit code "
    "0 = ready to train, 1 = something failed.",
    "unsloth_multigpu.tools.doctor.doctor_command",
)
