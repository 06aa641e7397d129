"""Does a run end or continue as it should after a fault?"""

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "chaos",
    "kill, stop and starve ranks of a script, and check whether its training ends or continues as it should",
    "Runs the script once without faults and then once per fault, and compares messages, time to the end, leftover "
    "processes, samples and weights. The script runs in this folder; checkpoints and logs of its Trainers go to a "
    "separate folder per run, and nothing is uploaded. Files that the script itself saves are saved in each run: "
    "{run} in its arguments is replaced by a new folder. Exit code 0 = every run ended or continued as it should.",
    "unsloth_multigpu.tools.chaos.chaos_command",
    runs_program=True,
    has_options_of_run=True,
)
