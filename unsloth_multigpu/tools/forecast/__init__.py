"""How long would a script take on N GPUs, and what limits it?"""

from unsloth_multigpu.cli.command import Command

COMMAND = Command(
    "forecast",
    "forecast the time of a script on several GPUs from some steps on one",
    "Runs the script up to the first steps of its first train() on one rank, and prints how long the training "
    "would take on other numbers of GPUs, the shares of waiting and communication, how many GPUs are useful, and "
    "what to change. The training saves nothing, and the rest of the script is not run. Exit code 0 = there is a "
    "forecast, 69 = there is none.",
    "unsloth_multigpu.tools.forecast.forecast_command",
    runs_program=True,
)
