"""One line about a second GPU, in a real Trainer's loop of one process."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.train import outlook
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.train.outlook import Outlook, outlook_of

CONFIG = MultiGPUConfig.resolve({})


def trainer_of(folder: Path, **arguments: Any) -> Trainer:
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        return {"input_ids": ids, "labels": ids}

    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_strategy": "no",
        **arguments,
    }
    return Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(str(folder), **given),
        train_dataset=[{"input_ids": [1] * n} for n in (5, 9, 14, 3, 8, 2, 11, 6) * 4],
        data_collator=collate,
    )


def lines_of(trainer: Trainer, caplog: pytest.LogCaptureFixture, config: MultiGPUConfig = CONFIG) -> list[str]:
    """What a training with the part says."""
    caplog.set_level(logging.INFO, logger="unsloth_multigpu")
    ours = logging.getLogger("unsloth_multigpu")
    before, ours.propagate = ours.propagate, True
    try:
        with Loop(trainer, [Outlook(trainer, config)]).steering():
            trainer.train()
    finally:
        ours.propagate = before
    return [record.getMessage() for record in caplog.records if "2 GPUs would" in record.getMessage()]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a minute after the one before."""
    seconds = iter(range(0, 60 * 10**6, 60))
    monkeypatch.setattr(outlook, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))


def test_long_training_says_what_a_second_gpu_would_bring(tmp_path, slow, caplog):
    # A minute a step, but for the step whose update is looked at; 600 steps.
    trainer = trainer_of(tmp_path, max_steps=600)
    trainer.add_callback(stop_at(17))
    (line,) = lines_of(trainer, caplog)
    assert line.startswith("2 GPUs would take ")
    assert line.endswith(" instead of 10 h 00 min (forecast, pcie assumed)")


def test_lengths_that_are_not_known_are_said_to_be_assumed(tmp_path, slow, caplog):
    trainer = trainer_of(tmp_path, max_steps=600)
    rows = trainer.train_dataset
    trainer.train_dataset = type("Rows", (), {"__len__": lambda _: len(rows), "__getitem__": lambda _, i: rows[i]})()
    trainer.add_callback(stop_at(17))
    (line,) = lines_of(trainer, caplog)
    assert line.endswith("(forecast, pcie assumed, samples of equal length assumed)")


def test_short_training_says_nothing(tmp_path, caplog):
    assert lines_of(trainer_of(tmp_path), caplog) == []


def test_training_that_ends_with_the_sixteenth_step_says_nothing(tmp_path, slow, caplog):
    assert lines_of(trainer_of(tmp_path, max_steps=16), caplog) == []


def test_a_step_of_one_sample_has_nothing_to_share(tmp_path, slow, caplog):
    trainer = trainer_of(tmp_path, max_steps=600, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    trainer.add_callback(stop_at(17))
    assert lines_of(trainer, caplog) == []


def test_micro_batches_of_a_step_can_be_shared(tmp_path, slow, caplog):
    trainer = trainer_of(tmp_path, max_steps=600, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    trainer.add_callback(stop_at(17))
    assert len(lines_of(trainer, caplog)) == 1


def test_line_is_for_one_gpu(tmp_path):
    trainer = trainer_of(tmp_path)
    assert outlook_of(trainer, CONFIG) is None  # On a CPU a second GPU is no answer.
    on_card = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cuda"), n_gpu=1, gradient_accumulation_steps=2),
        is_deepspeed_enabled=False,
        is_fsdp_enabled=False,
    )
    assert isinstance(outlook_of(on_card, CONFIG), Outlook)
    on_card.args.n_gpu = 2
    assert outlook_of(on_card, CONFIG) is None


def stop_at(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= step

    return Stop()
