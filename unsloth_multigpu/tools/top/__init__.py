"""What is a running job doing now, rank by rank?"""

from __future__ import annotations

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "top",
    "watch a running job: steps, speed, waiting and memory of each rank",
    "Shows a table of a job that runs on this machine, of a script or of a notebook, and ends when the job ends. "
    "Nothing is asked of the job: what its ranks write for their supervisor is read. Only your own jobs are seen.",
    "unsloth_multigpu.tools.top.top_command",
    operand="run_name",
)
