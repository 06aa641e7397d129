"""Gradient strategies in DDP's place. They attach as a part; nothing imports them."""
