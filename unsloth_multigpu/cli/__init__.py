"""The command `unsloth-multigpu`."""
