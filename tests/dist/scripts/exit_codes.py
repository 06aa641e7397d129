"""Imported before the line, it lets the supervisor also say, of each attempt but the last, what the command would have
exited with if the ranks were not started again."""

import sys

from unsloth_multigpu.launch import launcher

_tell_restart = launcher._tell_restart


def _tell_with_exit_code(cause, attempt):
    _tell_restart(cause, attempt)
    sys.stderr.write(f"[exit code {cause.exit_code}]\n")


launcher._tell_restart = _tell_with_exit_code
