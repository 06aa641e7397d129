"""Is it the same training as on one process?"""

from __future__ import annotations

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "verify",
    "compare the first steps of a script on one process and on several ranks",
    "Runs the script up to the first steps of its first train(), on one process and on several ranks, and compares "
    "samples, loss, gradient norm and what was added to the weights. The ranks also compute each step as one "
    "process does, from the same weights, and compare the gradients. The training saves nothing, what comes after "
    "it is not run; what the script does before it, it does twice. Exit code 0 = both agree, 77 = they do not, or "
    "too little could be compared; a script that fails ends it with the script's own code.",
    "unsloth_multigpu.tools.verify.verify_command",
    runs_program=True,
    has_options_of_run=True,
)
