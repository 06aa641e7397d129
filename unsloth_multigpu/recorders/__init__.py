"""What a tool does in the ranks of a run that it has started: records its steps, or injects faults."""
