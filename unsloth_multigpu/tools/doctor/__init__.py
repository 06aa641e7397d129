"""Is this machine ready for training on several GPUs?"""

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "doctor",
    "check versions, devices, copies between GPUs, an all-reduce and the patches",
    "Checks this machine. The last line says on which devices a script with enable_multi_gpu() would run. Exit code "
    "0 = ready to train, 1 = a check failed.",
    "unsloth_multigpu.tools.doctor.doctor_command",
)
