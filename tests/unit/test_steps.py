"""Metrics of trainers that deal their samples themselves are theirs."""

from types import SimpleNamespace

import torch

from unsloth_multigpu.config import MultiGPUConfig
from unsloth_multigpu.core.steps import StepFeed
from unsloth_multigpu.fault.beat import BeatPage
from unsloth_multigpu.launch.identity import SINGLE_PROCESS


def test_metrics_of_a_trainer_that_gathers_itself_are_not_merged_again():
    metrics = {"train": {"num_tokens": [100.0], "reward": [1.0, 2.0]}}
    args = SimpleNamespace(gradient_accumulation_steps=1, device=torch.device("cpu"))
    trainer = SimpleNamespace(args=args, model=torch.nn.Linear(1, 1), _metrics=metrics)
    # A manager that cannot meet anybody: every exchange with other ranks would raise.
    StepFeed(
        trainer, SimpleNamespace(config=MultiGPUConfig(), identity=SINGLE_PROCESS), BeatPage(None, 0)
    ).merge_metrics()
    assert metrics == {"train": {"num_tokens": [100.0], "reward": [1.0, 2.0]}}
