"""The forecast of memory against real tensors: a real Trainer's step, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.helpers.allocated import Allocated, bytes_of
from unsloth_multigpu.shard.activation import Weights, activations
from unsloth_multigpu.shard.describe import describe, describe_decoder, describe_tensors
from unsloth_multigpu.shard.description import Training
from unsloth_multigpu.shard.memory import TOLERANCE, forecast_memory
from unsloth_multigpu.shard.meta import make_model

VOCABULARY, ROWS, TOKENS = 1000, 2, 256
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
BF16, FP32 = torch.bfloat16, torch.float32


def with_lora(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", **options))


def build(folder: Path, kind: str, *, is_meta: bool = False) -> Any:
    """The model of a set-up; on the meta device as the probe makes it."""
    config = LlamaConfig(**SIZES, tie_word_embeddings="tied" in kind)
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
        model = LlamaForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=dtype)
    return with_lora(model, lora_dropout=0.1 if "dropout" in kind else 0.0) if "lora" in kind else model


class Gradients(TrainerCallback):
    num_bytes = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_bytes = bytes_of(p.grad for p in kwargs["model"].parameters() if p.grad is not None)


def trainer_of(model: Any, folder: Path, kind: str, **options: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (8, TOKENS), generator=generator).tolist()
    data = [{"input_ids": row, "labels": row, "attention_mask": [1] * TOKENS} for row in ids]
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


def weights_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
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


KINDS = (
    *("full fp32", "lora", "qlora double"),
    *(
        pytest.param(kind, marks=pytest.mark.thorough)
        for kind in (
            *("full bf16", "full tied", "lora checkpointing", "full autocast checkpointing"),
            *("full fp32 checkpointing", "full checkpointing", "full autocast", "lora dropout", "qlora"),
        )
    ),
)


@pytest.mark.parametrize("kind", KINDS)
def test_forecast_is_that_of_a_real_step(kind: str, tmp_path: Path, record_property: Any) -> None:
    trainer = trainer_of(build(tmp_path, kind), tmp_path, kind)
    gradients = Gradients()
    trainer.add_callback(gradients)
    description = describe(trainer)
    wanted = forecast_memory(description, "ddp", 1)
    trainer.train()
    model = trainer.model

    assert wanted.weights == bytes_of(weights_of(model))
    assert wanted.gradients == gradients.num_bytes
    assert wanted.optimizer == bytes_of(states_of(trainer))

    batch = next(iter(trainer.get_train_dataloader()))
    trainer.optimizer.zero_grad()
    before = [*weights_of(model), *states_of(trainer), *batch.values()]
    with Allocated(before) as allocated:
        trainer.training_step(trainer.model_wrapped, batch)
    forecast_bytes = wanted.gradients + wanted.activations
    record_property("peak", allocated.peak)
    record_property("off", forecast_bytes / allocated.peak - 1)
    assert forecast_bytes == pytest.approx(allocated.peak, rel=TOLERANCE)


@pytest.mark.parametrize(("attention", "is_padded"), [("sdpa", True), ("eager", False)])
def test_masks_and_scores_are_those_of_a_real_step(attention: str, is_padded: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention)).to(BF16).train()
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, : 100 * is_padded] = 0
    decoder = describe_decoder(model)
    assert decoder is not None
    training = Training("sgd", ROWS, TOKENS, padded=is_padded)
    num_in_head = VOCABULARY * SIZES["hidden_size"]
    kept = activations(decoder, training, Weights(2, trainable=True, numel=0, head_numel=num_in_head))

    with Allocated([*weights_of(model), ids, mask]) as allocated:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()

    assert decoder.exact
    assert kept.saved + kept.loss == pytest.approx(allocated.peak, rel=0.01)


@pytest.mark.parametrize("kind", ["lora", "qlora double", "full tied"])
def test_meta_model_is_described_as_the_real_one(kind: str, tmp_path: Path) -> None:
    real, meta = build(tmp_path, kind), build(tmp_path, kind, is_meta=True)

    assert all(p.is_meta for p in meta.parameters())
    assert describe_tensors(meta) == describe_tensors(real)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_8bit", "lion_8bit", "sgd", "adafactor", "rmsprop", "adagrad"])
def test_optimizer_states_are_those_of_a_real_step(name: str, tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 176})
    trainer = trainer_of(LlamaForCausalLM(config), tmp_path, "full", optim=name, optim_args="momentum=0.9")
    wanted = forecast_memory(describe(trainer), "ddp", 1)
    trainer.train()

    assert wanted.optimizer == bytes_of(states_of(trainer))
