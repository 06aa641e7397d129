"""What does a fault do to a run?"""

from __future__ import annotations

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "chaos",
    "kill, stop and starve ranks of a script, and see whether its training ends or continues as it should",
    "Runs the script once without faults and then with each, and compares what it says, how soon it ends, what it "
    "leaves behind, samples and weights. It runs in this folder; checkpoints and logs of its Trainers go to a "
    "folder of each run, and nothing is uploaded. What the script saves itself it saves again in each run: {run} "
    "in its arguments stands for a new folder. Exit code 0 = every run ended or went on as it should.",
    "unsloth_multigpu.tools.chaos.chaos_command",
    runs_program=True,
    has_options_of_run=True,
)
