"""The arithmetic of the memory forecast, against figures worked out by hand and against known sizes of models."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.shard.activation import Weights, activations, layer_bytes
from unsloth_multigpu.shard.description import Decoder, Description, Tensors, Training
from unsloth_multigpu.shard.memory import (
    CONTEXT_BYTES,
    GIB,
    NCCL_BYTES,
    RESERVE,
    calibrate,
    decide,
    fewest_ranks,
    fits,
    forecast_memory,
)
from unsloth_multigpu.shard.optimizer import optimizer_of
from unsloth_multigpu.tools.plan.command import parse_memory, show
from unsloth_multigpu.tools.program import parse_numbers

LAYER = "LlamaDecoderLayer"
LLAMA_8B = {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "key_heads": 8, "vocabulary": 128256}
QWEN_32B = {"hidden": 5120, "intermediate": 27648, "layers": 64, "heads": 40, "key_heads": 8, "vocabulary": 152064}
LLAMA_70B = {"hidden": 8192, "intermediate": 28672, "layers": 80, "heads": 64, "key_heads": 8, "vocabulary": 128256}


def llama(
    kind: str,
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    key_heads: int,
    vocabulary: int,
    rank: int = 16,
    **of_training: Any,
) -> Description:
    """A Llama in bfloat16; full, LoRA on all linear layers in float32, or QLoRA."""
    key = hidden // heads * key_heads
    matrices = [(hidden, hidden)] * 2 + [(key, hidden)] * 2 + [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
    is_full = kind == "full"
    packing: Any = "4bit" if kind == "qlora" else ""
    tensors = [Tensors(shape, "bfloat16", layers, is_full, packing, LAYER) for shape in matrices]
    tensors += [Tensors((hidden,), "bfloat16", 2 * layers, is_full, unit=LAYER)]
    tensors += [Tensors((hidden,), "bfloat16", 1, is_full)]
    tensors += [Tensors((vocabulary, hidden), "bfloat16", 1, is_full, unit="embedding", embedding=True)]
    tensors += [Tensors((vocabulary, hidden), "bfloat16", 1, is_full, unit="head")]
    if not is_full:
        for out, into in matrices:
            tensors += [Tensors((rank, into), "float32", layers, True, unit=LAYER, adapter=True)]
            tensors += [Tensors((out, rank), "float32", layers, True, unit=LAYER, adapter=True)]
    adapters = () if is_full else tuple((into, out, rank, layers) for out, into in matrices)
    decoder = Decoder(hidden, intermediate, layers, hidden, key, heads, vocabulary, adapters=adapters)
    training = {"optimizer": "adamw_torch_fused", "rows": 1, "tokens": 2048, "accumulation": 64, "checkpointing": "on"}
    units = ((LAYER, layers), ("embedding", 1), ("head", 1), ("rest", 1))
    return Description("Llama", tuple(tensors), decoder, Training(**{**training, **of_training}), units)


SMALL = {"hidden": 8, "intermediate": 16, "layers": 2, "heads": 2, "key_heads": 1, "vocabulary": 10}


def test_full_training_by_hand() -> None:
    small = llama("full", **SMALL, optimizer="adamw_torch", tokens=4)
    # A layer: 8 x 8 twice, 4 x 8 twice, 3 times 16 x 8, two norms of 8. The model: two layers, a norm, 2 x 10 x 8.
    num_parameters = 2 * (128 + 64 + 384 + 16) + 8 + 160
    wanted = forecast_memory(small, "ddp", 1)

    assert wanted.weights == wanted.gradients == 2 * num_parameters
    num_tensors = 2 * 9 + 3
    assert wanted.optimizer == 2 * 2 * num_parameters + 4 * num_tensors
    assert dict(wanted.overhead) == {"context": CONTEXT_BYTES}
    # AdamW over all tensors at once: one more copy of the weights than what autograd keeps.
    assert wanted.activations == max(wanted.activations, wanted.gradients)
    assert wanted.total == sum((wanted.weights, wanted.gradients, wanted.optimizer, wanted.activations, CONTEXT_BYTES))
    assert wanted.allocated == wanted.total - CONTEXT_BYTES


def test_rank_that_has_most_of_a_sharded_model_by_hand() -> None:
    small = llama("full", **SMALL, optimizer="adamw_torch", tokens=4)
    wanted = forecast_memory(small, "sharded", 3)
    # First dimensions 8, 4, 16 and 10 on 3 ranks: 3, 2, 6 and 4 rows.
    most = 2 * (2 * 3 * 8 + 2 * 2 * 8 + 2 * 6 * 8 + 3 * 16 + 2 * 3) + 3 + 2 * 4 * 8

    assert wanted.weights == wanted.gradients == 2 * most
    assert wanted.optimizer == 2 * 2 * most + 4 * 21
    layer, head, norm = 2 * 592, 2 * 80, 2 * 8
    # Most is there while the last layer goes backward: it, the next one, its gradient, and what is sent of the head's.
    assert dict(wanted.overhead)["gathered layers"] == 3 * layer + head + norm
    assert dict(wanted.overhead)["NCCL"] == NCCL_BYTES


def test_what_is_offloaded_is_on_the_host_by_hand() -> None:
    small = llama("full", **SMALL, optimizer="adamw_torch", tokens=4)
    there = forecast_memory(small, "sharded", 3)
    wanted = forecast_memory(replace(small, training=replace(small.training, offload=True)), "sharded", 3)

    assert (wanted.weights, wanted.gradients, wanted.optimizer) == (0, 0, 0)
    # One more copy for the update, which is made there.
    assert wanted.host == there.weights + 2 * there.gradients + there.optimizer
    # All of the whole gradients, without the part of the head's, which has left.
    part_of_head = 2 * (4 * 8 + 3)
    assert wanted.overhead_bytes == there.overhead_bytes + there.gradients - part_of_head
    assert wanted.activations <= there.activations
    assert forecast_memory(replace(small, training=replace(small.training, offload=True)), "ddp", 3) == forecast_memory(
        small, "ddp", 3
    )


def test_gradients_are_whole_between_micro_batches() -> None:
    small = llama("full", **SMALL, tokens=4)
    wanted = forecast_memory(small, "sharded", 3)
    # Of two layers and the embedding. The head's have been divided: a part is 4 of its 10 rows, 3 of the norm's 8.
    whole = 2 * (2 * 592 + 80) + 2 * (4 * 8 + 3)
    assert dict(wanted.overhead)["whole gradients"] + wanted.gradients == whole
    once = replace(small, training=replace(small.training, accumulation=3))
    assert "whole gradients" not in dict(forecast_memory(once, "sharded", 3).overhead)


def test_mixed_precision_trains_in_float32_only_where_it_is_sharded() -> None:
    small = llama("full", **SMALL, optimizer="adamw_torch", tokens=4, autocast="bfloat16")

    assert forecast_memory(small, "ddp", 2).weights == forecast_memory(small, "ddp", 1).weights
    # 2 divides all first dimensions but the norm's: 4 bytes for 2, on half of them.
    assert forecast_memory(small, "sharded", 2).weights == forecast_memory(small, "ddp", 2).weights


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        ("", 2 * 4096 * 64),
        ("4bit", 4096 * 64 // 2 + 4 * 4096 + 64),
        ("4bit double", 4096 * 64 // 2 + 4096 + 4 * 16 + 4 + 64 + 1024),
        ("8bit", 4096 * 64 + 4 * 4096),
    ],
)
def test_packed_weights_by_hand(packing: Any, expected: int) -> None:
    assert Tensors((4096, 64), "bfloat16", 1, False, packing).weight_bytes() == expected


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("adamw_torch", {}, 2 * 100 * 64 * 2 + 4),
        ("adamw_torch_fused", {}, 2 * 100 * 64 * 2 + 4),
        ("adamw_apex_fused", {}, 2 * 100 * 64 * 4),
        ("adamw_8bit", {}, 2 * (6400 + 4 * 25)),
        ("adamw_bnb_8bit", {}, 2 * (6400 + 4 * 25)),
        ("paged_adamw_32bit", {}, 2 * 6400 * 4),
        ("lion_8bit", {}, 6400 + 4 * 25),
        ("sgd", {}, 0),
        ("sgd", {"momentum": "0.9"}, 2 * 6400),
        ("sgd", {"momentum": "0"}, 0),
        ("rmsprop", {"momentum": "0.9", "centered": "True"}, 3 * 2 * 6400 + 4),
        ("adafactor", {}, 4 * (100 + 64) + 4),
    ],
)
def test_states_of_a_matrix_in_bfloat16(name: str, arguments: dict[str, str], expected: int) -> None:
    assert optimizer_of(name, arguments).state_bytes((100, 64), 2, embedding=False) == expected


def test_small_tensors_and_embeddings_have_no_8_bit_states() -> None:
    adam = optimizer_of("adamw_8bit")

    assert adam.state_bytes((4095,), 2, embedding=False) == 2 * 4 * 4095
    assert adam.state_bytes((4096,), 2, embedding=False) == 2 * (4096 + 4 * 16)
    assert adam.state_bytes((4096,), 2, embedding=True) == 2 * 4 * 4096


def test_activations_of_a_layer_by_hand() -> None:
    decoder = Decoder(hidden=8, intermediate=16, num_layers=2, query=8, key=4, num_heads=2, vocabulary=10)
    training = Training("sgd", rows=2, tokens=4)
    weights = Weights(item_bytes=4, trainable=True, numel=576, head_numel=80)
    # For each of 8 tokens: two norms keep input, normalised and output of 8, and a number; attention keeps queries and
    # output of 8, keys and values of 4 and a number for each of 2 heads; the MLP keeps 4 times 16. In float32.
    each = 4 * (2 * (3 * 8 + 1) + 2 * 8 + 2 * 4 + 2 + 4 * 16)
    assert layer_bytes(decoder, training, weights) == 8 * each

    kept = activations(decoder, training, weights)
    head, angles = 8 * 4 * (3 * 8 + 1), 2 * 4 * 4 * 4
    assert kept.saved == 2 * 8 * each + head + angles
    assert kept.loss == 8 * 10 * 3 * 4
    assert kept.layer == 8 * 4 * (2 * 16 + 8)

    anew = activations(decoder, replace(training, checkpointing="on"), weights)
    assert anew.saved == 2 * 8 * 8 * 4 + head + angles
    assert anew.layer == kept.layer + 8 * each
    # The inputs of layers are in the host's memory.
    offloaded = activations(decoder, replace(training, checkpointing="offloaded"), weights)
    assert offloaded.saved == head + angles


def test_mask_of_padded_rows_and_eager_scores_grow_with_the_square() -> None:
    decoder = Decoder(hidden=8, intermediate=16, num_layers=2, query=8, key=4, num_heads=2, vocabulary=10)
    weights = Weights(item_bytes=2, trainable=False, numel=576, head_numel=80)
    plain = Training("sgd", rows=2, tokens=512)

    def layer(training: Training, decoder: Decoder = decoder) -> int:
        return layer_bytes(decoder, training, weights)

    masked = layer(replace(plain, padded=True)) - layer(plain)
    # Keys and values for all heads, and the mask in bfloat16.
    assert masked == 1024 * 2 * 2 * 4 + 2 * 512 * 512 * 2
    assert layer(replace(plain, padded=True), replace(decoder, attention="flash")) == layer(plain)
    assert layer(plain, replace(decoder, attention="eager")) > 2 * 2 * 512 * 512 * 6


def test_loss_in_chunks_does_not_grow_with_the_tokens() -> None:
    short, long = (llama("full", **SMALL, tokens=n, loss="in chunks", rows=1) for n in (2048, 8192))
    weights = Weights(2, True, 1, 1)
    assert short.decoder is not None
    assert (
        activations(short.decoder, short.training, weights).loss
        == activations(short.decoder, long.training, weights).loss
    )


def test_ranks_share_the_samples_of_a_step() -> None:
    training = Training("sgd", rows=8, tokens=4, accumulation=2)
    shares = [(n, (t := training.on_ranks(n)).rows, t.accumulation) for n in (1, 2, 3, 4, 16, 32)]

    assert shares == [(1, 8, 2), (2, 8, 1), (3, 6, 1), (4, 4, 1), (16, 1, 1), (32, 1, 1)]
    assert replace(training, keeps_batch=False).on_ranks(16) == replace(training, keeps_batch=False)


def test_gradients_take_the_place_of_activations_in_one_process_without_accumulation() -> None:
    once = llama("full", **SMALL, accumulation=1, checkpointing="off")
    many = llama("full", **SMALL, accumulation=2, checkpointing="off")

    assert forecast_memory(once, "ddp", 1).activations < forecast_memory(many, "ddp", 1).activations
    # DDP's buckets are there from the start.
    assert forecast_memory(replace(once, training=replace(once.training, keeps_batch=False)), "ddp", 2).activations == (
        forecast_memory(many, "ddp", 1).activations
    )


@pytest.mark.parametrize(
    ("sizes", "kind", "ddp", "sharded"),
    [
        # GiB of a rank of 8, by a rougher formula: 2048 tokens, checkpointing, no logits, Adam's states in float32,
        # and where it is sharded the whole gradients between micro-batches.
        (LLAMA_8B, "lora", 18, 7),
        (LLAMA_8B, "full", 92, 30),
        (QWEN_32B, "qlora", 24, 9),
        (LLAMA_70B, "qlora", 47, 15),
        (LLAMA_70B, "lora", 139, 28),
    ],
)
def test_known_models_are_in_range(sizes: dict[str, int], kind: str, ddp: int, sharded: int) -> None:
    description = llama(kind, **sizes, optimizer="paged_adamw_32bit", loss="in chunks")
    whole, parts = (forecast_memory(description, way, 8).total / GIB for way in ("ddp", "sharded"))

    assert whole == pytest.approx(ddp, rel=0.15)
    assert parts == pytest.approx(sharded, abs=5)


def test_numbers_of_parameters_are_those_of_the_models() -> None:
    def billions(sizes: dict[str, int]) -> float:
        return sum(math.prod(t.shape) * t.count for t in llama("full", **sizes).parameters()) / 1e9

    assert [round(billions(s), 2) for s in (LLAMA_8B, LLAMA_70B)] == [8.03, 70.55]


def test_decision_and_its_line() -> None:
    lora = llama("lora", **LLAMA_70B)

    chosen = decide(lora, 8, 80 * GIB)
    needs = [f"{forecast_memory(lora, way, 8).total / GIB:.0f}" for way in ("ddp", "sharded")]
    assert chosen.way == "sharded"
    assert chosen.text == f"DDP needs {needs[0]} GiB of 80, sharded over 8 ranks {needs[1]}: sharded"
    assert decide(llama("lora", **LLAMA_8B), 8, 80 * GIB).way == "ddp"
    with pytest.raises(SetupError, match="DDP needs") as refused:
        decide(lora, 2, 48 * GIB)
    number = fewest_ranks(lora, "sharded", 48 * GIB)
    assert number is not None
    assert refused.value.hint.startswith(f"{number} GPUs of this size would do, sharded.")
    assert fits(forecast_memory(lora, "sharded", number), 48 * GIB)
    assert not fits(forecast_memory(lora, "sharded", number - 1), 48 * GIB)
    with pytest.raises(SetupError, match="No number of GPUs of this size would do"):
        decide(lora, 2, 4 * GIB)


def test_optimizer_that_needs_whole_weights_is_no_way_out() -> None:
    lora = llama("lora", **LLAMA_70B, optimizer="adamw_8bit", trains_parts=False)
    with pytest.raises(SetupError, match="optim='adamw_8bit' does not train sharded weights"):
        decide(lora, 8, 80 * GIB)
    assert fewest_ranks(lora, "sharded", 80 * GIB) is None


def test_nothing_fits_near_the_limit() -> None:
    wanted = forecast_memory(llama("lora", **LLAMA_8B), "ddp", 1)

    assert not fits(wanted, wanted.total)
    assert not fits(wanted, round(wanted.total / (1 - RESERVE)) - 1000)
    assert fits(wanted, round(wanted.total / (1 - RESERVE)) + 1000)


def test_packed_weights_have_to_be_loaded_whole() -> None:
    description = llama("qlora", **LLAMA_70B)
    wanted = forecast_memory(description, "sharded", 8)

    assert wanted.total < 24 * GIB * (1 - RESERVE)
    assert not fits(wanted, 24 * GIB)
    with pytest.raises(SetupError, match="while it is loaded"):
        decide(description, 8, 24 * GIB)


@pytest.mark.parametrize(
    "changed",
    [
        {"decoder": None},
        {"training": Training("galore_adamw", rows=1, tokens=8)},
        {"training": Training("adamw_torch_4bit", rows=1, tokens=8)},
    ],
)
def test_what_is_not_known_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=r"not known|cannot be forecast") as refused:
        forecast_memory(replace(llama("full", **SMALL), **changed), "ddp", 1)
    assert "shard='on'" in refused.value.hint


def test_dtype_that_is_not_known_is_refused() -> None:
    with pytest.raises(SetupError, match="complex64"):
        Tensors((1,), "complex64", 1, True)


@pytest.mark.parametrize(("share", "sentence"), [(1.14, None), (0.86, None), (1.3, "30% more"), (0.5, "50% less")])
def test_calibration_says_what_was_off(share: float, sentence: str | None) -> None:
    wanted = forecast_memory(llama("lora", **LLAMA_8B), "ddp", 2)
    text = calibrate(wanted.allocated, round(wanted.allocated * share))

    assert (text is None) if sentence is None else (text is not None and sentence in text)


@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_description_survives_json(kind: str) -> None:
    description = replace(
        llama(kind, **SMALL, optimizer_arguments=(("momentum", "0.9"),), autocast="bfloat16"), notes=("a",)
    )

    assert Description.from_values(json.loads(json.dumps(description.plain_values()))) == description


@pytest.mark.parametrize(
    ("text", "expected"), [("24GiB", 24 * GIB), ("24", 24 * GIB), ("80GB", 80 * 10**9), ("1.5 gib", 3 * GIB // 2)]
)
def test_memory_of_the_command_line(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "24 cats", "GiB", "0", "-1GiB"])
def test_wrong_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "two", "1.5", "-1"])
def test_wrong_numbers_of_gpus_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        parse_numbers(text)


def lines_of(description: Description, numbers: Sequence[int], device_bytes: int | None) -> list[str]:
    rows = [forecast_memory(description, way, n) for n in numbers for way in ("ddp", "sharded")]
    stream = io.StringIO()
    show(Screen(stream), description, rows, (), device_bytes)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("loss", "told"), [("in chunks", "loss in chunks"), ("whole logits", "loss from whole logits")]
)
def test_first_line_says_how_the_loss_is_computed(loss: Any, told: str) -> None:
    assert lines_of(llama("lora", **LLAMA_70B, loss=loss), [1], None)[0].endswith(f", {told}")


def test_table_says_which_row_fits_and_what_to_set() -> None:
    lines = lines_of(llama("lora", **LLAMA_70B), parse_numbers("8,4,8"), 80 * GIB)

    assert [line.split()[:2] for line in lines if line.endswith(("fits", "too large"))] == [
        ["4", "ddp"],
        ["4", "sharded"],
        ["8", "ddp"],
        ["8", "sharded"],
    ]
    assert lines[-2:] == ["68 of 80 GiB count: 15% stay free.", 'With 4 GPUs: enable_multi_gpu(shard="on")']
    assert "give --memory" in lines_of(llama("lora", **LLAMA_70B), [8], None)[-1]
    assert "No row fits." in lines_of(llama("full", **LLAMA_70B), [2], 80 * GIB)[-1]


def test_more_ranks_than_samples_are_no_way_out() -> None:
    lora = llama("lora", **LLAMA_70B, accumulation=4)

    lines = lines_of(lora, [4, 8], 40 * GIB)
    assert [line.split()[0] for line in lines if line.endswith("too few samples")] == ["8", "8"]
    assert lines[-2] == "A step has 4 samples, too few for 8 ranks: raise the batch."
    assert fewest_ranks(lora, "sharded", 40 * GIB) is None
    assert fewest_ranks(replace(lora, training=replace(lora.training, keeps_batch=False)), "sharded", 40 * GIB)
