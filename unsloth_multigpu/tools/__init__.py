"""The commands besides `run`."""
