"""What the commands of `unsloth-multigpu` share."""
