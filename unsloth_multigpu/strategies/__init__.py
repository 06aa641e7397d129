"""Gradient strategies that replace DDP. They attach as a part; nothing imports them."""
