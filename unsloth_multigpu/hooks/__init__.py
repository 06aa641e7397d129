"""What do we touch? Patches as data, each with the range it holds for and its reason."""
