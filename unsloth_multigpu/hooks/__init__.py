"""What do we touch? Patches as data, each with the versions that it supports and its reason."""
