"""Strategies that synchronize gradients or weights in place of DDP."""
