"""Imported before the line, it lets the supervisor also say, of each attempt but the last, what the command would have
exited with if the ranks were not started again."""

import sys

from unsloth_multigpu.launch.launcher import DDPLauncher

_report_failure = DDPLauncher._report_failure


def _tell_with_exit_code(launcher, attempt, cause, events):
    code = _report_failure(launcher, attempt, cause, events)
    if code is None:
        sys.stderr.write(f"[exit code {cause.exit_code}]\n")
    return code


DDPLauncher._report_failure = _tell_with_exit_code
