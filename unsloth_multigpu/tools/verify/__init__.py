"""Is it the same training as on one process?"""

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "verify",
    "compare the first steps of a script on one process and on several ranks",
    "Runs the script up to the first steps of its first train(), on one process and on several ranks, and compares "
    "samples, loss, gradient norm and changes of the weights. The ranks also compute each step as one process "
    "does, from the same weights, and compare the gradients. The training saves nothing, and the rest of the script "
    "is not run; the code before train() is run twice. Exit code 0 = both agree, 77 = they differ, or too little "
    "could be compared; if the script fails, its own exit code.",
    "unsloth_multigpu.tools.verify.verify_command",
    runs_program=True,
    has_options_of_run=True,
)
