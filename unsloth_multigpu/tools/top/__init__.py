"""What is a running job doing now, rank by rank?"""

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "top",
    "watch a running job: steps, speed, waiting and memory of each rank",
    "Shows a table of a script's or notebook's job on this machine, and ends when the job ends. It reads what the "
    "ranks write for their supervisor, and does not disturb the job. Only your own jobs are visible.",
    "unsloth_multigpu.tools.top.top_command",
    operand="run_name",
)
