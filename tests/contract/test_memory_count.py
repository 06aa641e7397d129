"""Counted memory against real tensors: steps of the real Trainer, whole and in parts, on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.shard import count
from unsloth_multigpu.shard.count import count_step, describe, forecasts, micro_batch
from unsloth_multigpu.shard.fake import ByteCounter, fake_memory
from unsloth_multigpu.shard.memory import StepBytes
from unsloth_multigpu.shard.script_probe import make_model, meta_patches

VOCABULARY, ROWS, TOKENS = 1000, 2, 64
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
BF16, FP32, CPU = torch.bfloat16, torch.float32, torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def patched() -> Iterator[None]:
    """As in the child that is asked; these tests load models themselves."""
    registry = PatchRegistry([patch for patch in meta_patches() if "from_pretrained" not in patch.target])
    registry.apply()
    yield
    registry.undo()


def with_lora(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", **options))


def build(folder: Path, kind: str, *, is_meta: bool) -> Any:
    """The model of a set-up; on the meta device as the child makes it."""
    attention = "eager" if "eager" in kind else "sdpa"
    config = LlamaConfig(**SIZES, tie_word_embeddings="tied" in kind, attn_implementation=attention)
    dtype = FP32 if "fp32" in kind or "autocast" in kind else BF16
    quantization = None
    if "qlora" in kind:
        from transformers import BitsAndBytesConfig
        from transformers.quantizers import AutoHfQuantizer

        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant="double" in kind,
            bnb_4bit_compute_dtype=BF16,
        )
    if is_meta:
        config.quantization_config = quantization
        quantizer = None if quantization is None else AutoHfQuantizer.from_config(quantization, pre_quantized=False)
        model = make_model(LlamaForCausalLM, config, dtype, quantizer)
    else:
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
        # Not saved with the configuration.
        model = LlamaForCausalLM.from_pretrained(
            folder, quantization_config=quantization, dtype=dtype, attn_implementation=attention
        )
    return with_lora(model, lora_dropout=0.1 if "dropout" in kind else 0.0) if "lora" in kind else model


class Gradients(TrainerCallback):
    num_bytes = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_bytes = bytes_of(p.grad for p in kwargs["model"].parameters() if p.grad is not None)


def trainer_of(model: Any, folder: Path, kind: str, **options: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (8, TOKENS), generator=generator).tolist()
    num_padded = 20 * ("padded" in kind)
    mask = [0] * num_padded + [1] * (TOKENS - num_padded)
    data = [{"input_ids": row, "labels": row, "attention_mask": mask} for row in ids]
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": ROWS,
        "max_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": "checkpointing" in kind,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": "autocast" in kind,
    }
    return Trainer(model, TrainingArguments(str(folder), **{**arguments, **options}), train_dataset=data)


def bytes_of(tensors: Any) -> int:
    """Of their storages, each once."""
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def weights_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers with the constants of packed weights."""
    for parameter in model.parameters():
        yield parameter.data
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code)
            if state.nested:
                yield from (state.offset, state.state2.absmax, state.state2.code)
    yield from model.buffers()


def states_of(trainer: Trainer) -> Iterator[torch.Tensor]:
    for state in trainer.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def counted(trainer: Trainer, **options: Any) -> StepBytes:
    batch = micro_batch(trainer, describe(trainer), ROWS)
    return count_step(trainer, batch, **{"num_passes": 1, **options})


THOROUGH = ("full fp32", "full tied", "lora checkpointing", "full checkpointing", "full autocast", "lora dropout")
KINDS = (
    *("lora padded", "qlora double", "full autocast checkpointing"),
    *(pytest.param(kind, marks=pytest.mark.thorough) for kind in (*THOROUGH, "qlora", "full eager")),
)


@pytest.mark.parametrize("kind", KINDS)
def test_count_is_that_of_a_real_step(kind: str, tmp_path: Path) -> None:
    found = counted(trainer_of(build(tmp_path, kind, is_meta=True), tmp_path, kind))
    trainer, gradients = trainer_of(build(tmp_path, kind, is_meta=False), tmp_path, kind), Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    model = trainer.model
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.optimizer.zero_grad()
    with ByteCounter(CPU) as real:
        trainer.training_step(trainer.model_wrapped, batch)

    # bitsandbytes keeps one table of its 16 values for all weights.
    assert found.weights == pytest.approx(bytes_of(weights_of(model)), rel=1e-3)
    assert found.gradients == gradients.num_bytes
    assert found.optimizer == bytes_of(states_of(trainer))
    assert found.peak == pytest.approx(real.peak, rel=1e-3)


SHARED, SHARDED = {"num_sharing": 2}, {"num_ranks": 2, "num_passes": 2}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("full padded", SHARED),
        pytest.param("lora checkpointing", SHARED, marks=pytest.mark.thorough),
        ("lora", SHARDED),
        pytest.param("full autocast checkpointing", SHARDED, marks=pytest.mark.thorough),
    ],
)
def test_count_of_two_ranks_is_that_of_real_ones(
    kind: str, options: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share each sample, or each has a part of the weights."""

    def trainer() -> Trainer:
        return trainer_of(build(tmp_path, kind, is_meta=True), tmp_path, kind)

    whole, found = counted(trainer()), counted(trainer(), **options)
    # The same with values: the group sends nothing, and what is received is what memory held.
    monkeypatch.setattr(count, "fake_memory", ByteCounter)
    real = counted(trainer(), **options)

    for name in ("weights", "sharded", "gradients", "optimizer"):
        assert getattr(found, name) == getattr(real, name)
    assert found.peak == pytest.approx(real.peak, rel=0.01)
    share = 0.5 if options == SHARDED else 1
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(found, name) == pytest.approx(share * getattr(whole, name), rel=0.01)
    if options == SHARED:
        assert found.peak - found.gradients < 0.75 * (whole.peak - whole.gradients)
    else:  # Whole gradients of the first micro-batch, and gathered layers.
        assert found.peak > whole.peak


def test_experts_images_and_own_losses_are_counted(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    class Picture(nn.Module):
        """Its loss chooses by values, by a mask of the batch, and writes single values to a log."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
            self.log: list[float] = []

        def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(pixels)
            hard = torch.nn.functional.cross_entropy(logits, labels, reduction="none").topk(1).indices
            loss = torch.nn.functional.cross_entropy(logits[labels >= 0], labels[labels >= 0])
            self.log.append(loss.item())
            return {"loss": loss + logits[hard].sum(), "logits": logits}

    experts = MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        num_local_experts=4,
        experts_implementation="eager",
    )
    own_folder = tmp_path / "own"
    data = [{"pixels": torch.randn(3, 16, 16), "labels": i % 5} for i in range(8)]
    picture = trainer_of(Picture(), own_folder, "full")
    picture.train_dataset = data
    for trainer in (trainer_of(MixtralForCausalLM(experts), tmp_path, "full fp32"), picture):
        found = counted(trainer)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.current_gradient_accumulation_steps = 1
        with ByteCounter(CPU) as real:
            trainer.training_step(trainer.model, batch)

        # Which experts are asked depends on values.
        assert found.peak == pytest.approx(real.peak, rel=0.05)
        assert all(not p.is_meta and p.grad is not None for p in trainer.model.parameters())


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_8bit", "sgd", "adafactor"])
def test_optimizer_states_are_those_of_a_real_step(name: str, tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 176})
    trainer = trainer_of(LlamaForCausalLM(config), tmp_path, "full", optim=name, optim_args="momentum=0.9")
    found = counted(trainer)
    assert trainer.optimizer is None
    trainer.train()

    assert found.optimizer == bytes_of(states_of(trainer))


def test_optimizer_of_the_script_is_counted_and_is_left_alone(tmp_path: Path) -> None:
    trainer = trainer_of(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path, "full")
    own = torch.optim.Adam([{"params": [p], "lr": 0.1} for p in trainer.model.parameters()])
    trainer.optimizer, model = own, trainer.model
    found = counted(trainer)

    assert found.optimizer == pytest.approx(2 * found.weights, rel=0.01)
    assert trainer.model is model
    assert trainer.optimizer is own
    assert not own.state
    assert all(p.grad is None for p in trainer.model.parameters())


def test_step_that_needs_values_is_refused(tmp_path: Path) -> None:
    class Needs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.tensor(model(**inputs).logits[0, 0, :2].tolist()).sum()

    trainer = trainer_of(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path, "full")
    trainer.__class__ = Needs
    with pytest.raises(SetupError, match="LlamaForCausalLM: the first step cannot be run on tensors without values"):
        next(forecasts(trainer, describe(trainer), [("ddp", 1)]))


def test_longest_sample_is_in_the_batch_and_the_shortest_pads_it(tmp_path: Path) -> None:
    trainer = trainer_of(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path, "full")
    trainer.train_dataset = [{"input_ids": [1] * n, "labels": [1] * n} for n in (3, 9, 5)]
    trainer.data_collator = lambda samples: [len(sample["input_ids"]) for sample in samples]

    assert describe(trainer).tokens == 9
    assert describe(trainer).notes == ("micro-batches of 2 x 9 tokens (the longest of 3 samples)",)
    assert micro_batch(trainer, describe(trainer), 3) == [9, 9, 3]
    assert micro_batch(trainer, describe(trainer, tokens=20), 2) == [20, 3]
    assert micro_batch(trainer, describe(trainer, tokens=4), 1) == [4]


def test_memory_that_is_freed_counts_no_more() -> None:
    with fake_memory(CPU) as counter:
        first = torch.empty(1000)
        second = first + 1
        assert counter.now == 8000
        del first, second
        gc.collect()
        assert (counter.now, counter.peak) == (0, 8000)
        counter.reset_peak()
        assert counter.peak == 0
