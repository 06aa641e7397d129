"""How many GPUs does a script need, and should it be sharded?"""

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "plan",
    "forecast the memory of a script on several numbers of GPUs, without loading weights",
    "Runs the script up to its first train(), with a model that has shapes and no weights, and prints the memory "
    "that each rank would need: with DDP, where every rank has the whole model, and sharded by FSDP2. The code "
    "before train(), such as tokenizing, is run. Exit code 0 = a row fits, 69 = none fits, or there is no forecast.",
    "unsloth_multigpu.tools.plan.plan_command",
    runs_program=True,
)
