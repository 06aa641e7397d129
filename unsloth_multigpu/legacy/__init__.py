"""The older plugin's serial path, to be compared with."""
