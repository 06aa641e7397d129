"""Metrics of trainers that deal their samples themselves are theirs."""

from types import SimpleNamespace

from unsloth_multigpu.core.steps import StepFeed


def test_metrics_of_a_trainer_that_gathers_itself_are_not_merged_again():
    metrics = {"train": {"num_tokens": [100.0], "reward": [1.0, 2.0]}}
    trainer = SimpleNamespace(args=SimpleNamespace(gradient_accumulation_steps=1), _metrics=metrics)
    # Without a manager every exchange with other ranks would raise.
    StepFeed(trainer, None).merge_metrics()
    assert metrics == {"train": {"num_tokens": [100.0], "reward": [1.0, 2.0]}}
