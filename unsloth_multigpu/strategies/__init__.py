"""Gradient strategies that replace DDP, each a part of the training."""
