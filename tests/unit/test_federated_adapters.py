"""Tensors of clients: dtypes, layouts and adapters on the disk; the mean of LoRA products against the dense mean."""

import copy
import math

import pytest

pytest.importorskip("flwr", reason="Flower needs Python 3.11 or newer")

import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.tiny import build_tiny
from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.adapters import (
    describe_adapter,
    exchanged_tensors,
    frozen_factors,
    is_quantized,
    layout_of,
    save_adapter,
    to_arrays,
    variants,
    write_arrays,
)
from unsloth_multigpu.federated.aggregation import (
    aggregate_lora,
    find_pairs,
    mean_of_products,
    not_projectable,
    to_tensor,
    weighted_mean,
)
from unsloth_multigpu.federated.client import ClientModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    path = build_tiny(tmp_path_factory.mktemp("base") / "tiny", vocab_size=600)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def with_lora(base, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    options = {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], **options}
    model = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_" in name:
                parameter.normal_(std=0.05)
    return model


def state_of(model):
    return to_arrays(exchanged_tensors(model))


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 22)[None]).logits


def test_half_precision_travels_as_float32_and_comes_back():
    model = nn.Sequential(nn.Linear(3, 2).bfloat16(), nn.Linear(2, 2).half(), nn.Linear(2, 2).double())
    before = copy.deepcopy(model)
    arrays = state_of(model)
    assert {array.dtype for array in arrays.values()} == {"float32", "float64"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert float(to_tensor(arrays["0.weight"]).abs().sum()) > 0  # A copy, not the model's own memory.
    write_arrays(exchanged_tensors(model), arrays)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in before.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"down_proj": 4}, "alpha_pattern": {"q_proj": 5}},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"modules_to_save": ["lm_head"], "lora_bias": True, "target_modules": ["down_proj"]},
        {"bias": "lora_only", "modules_to_save": ["norm"]},
    ],
    ids=["plain", "patterns", "embedding", "bias-and-head", "own-biases-and-norms"],
)
def test_adapter_that_peft_loads_from_the_disk_is_the_same_model(base, options, tmp_path):
    from peft import PeftModel

    if "lora_bias" in options or "bias" in options:
        base = _with_bias(base)
    model = with_lora(base, **options)
    if options.get("bias") == "lora_only":
        model.base_model.model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    _move(model)
    built, arrays = ClientModel(lambda: copy.deepcopy(model), 0), state_of(model)
    expected = logits(built.prepare(arrays, CPU))
    assert float((expected - logits(base)).abs().max()) > 1e-3
    save_adapter(tmp_path, {name: to_tensor(array) for name, array in arrays.items()}, describe_adapter(model))
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path))
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=2e-5)


def _move(model):
    """As training does, whatever is trained."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)


def _with_bias(base):
    base = copy.deepcopy(base)
    for layer in base.model.layers:
        layer.mlp.down_proj.bias = nn.Parameter(torch.zeros(layer.mlp.down_proj.out_features))
    return base


def test_frozen_a_is_told_for_the_disk(base, tmp_path):
    from peft import PeftModel

    model = with_lora(base)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    exchanged = exchanged_tensors(model)
    frozen = frozen_factors(model, exchanged)
    assert len(frozen) == len(exchanged) == 4
    assert all("lora_A" in name for name in frozen)
    described = describe_adapter(model)
    save_adapter(tmp_path, {name: v.detach() for name, v in (exchanged | frozen).items()}, described)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path))), logits(model))


def test_what_is_no_plain_lora_is_named(base):
    def reasons(model):
        return variants(model, exchanged_tensors(model))

    assert reasons(with_lora(base)) == []
    assert "lora_magnitude_vector" in reasons(with_lora(base, use_dora=True))[0]
    assert describe_adapter(nn.Linear(2, 2)) == describe_adapter(base) == ""


def test_four_bit_base_stays_and_counts_with_its_real_shape():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4", compute_dtype=torch.float32))
    model.to("cpu")  # bitsandbytes packs here.
    model = get_peft_model(model, LoraConfig(target_modules=["0"], r=2))
    model(torch.randn(2, 64))
    assert is_quantized(model)
    assert len(state_of(model)) == 2
    assert any(line.endswith("weight: (32, 64)") for line in layout_of(model)), layout_of(model)
    client_model = ClientModel(lambda: model, 0)
    prepared = client_model.prepare(state_of(model), CPU)
    prepared(torch.randn(2, 64)).sum().backward()
    client_model.release()
    assert client_model.build(CPU).model is prepared


A, B = "base_model.model.q_proj.lora_A.default.weight", "base_model.model.q_proj.lora_B.default.weight"


@st.composite
def federations(draw):
    """[(A, B)] of some clients and their weights; some clients' B are 0, as LoRA starts."""
    rows, columns, rank, num_clients = (draw(st.integers(1, high)) for high in (9, 9, 5, 5))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    start = torch.randn(rank, columns)
    spread = draw(st.sampled_from([0.0, 0.01, 1.0]))
    pairs = [
        (start + spread * torch.randn(rank, columns), draw(st.sampled_from([0, 1e-3, 1])) * torch.randn(rows, rank))
        for _ in range(num_clients)
    ]
    weights = [draw(st.integers(0, 50)) for _ in pairs]
    return pairs, [weights[0] + 1, *weights[1:]]


def dense_mean(pairs, weights):
    total = sum(weights)
    return sum(weight / total * b.double() @ a.double() for (a, b), weight in zip(pairs, weights, strict=True))


def record(**tensors):
    return ArrayRecord({{"a": A, "b": B}.get(name, name): Array(value.numpy()) for name, value in tensors.items()})


def records(pairs):
    return [record(a=a, b=b) for a, b in pairs]


def plain_mean(pairs, weights):
    return weighted_mean(records(pairs), weights, [A, B])


def product(arrays):
    return to_tensor(arrays[B]).double() @ to_tensor(arrays[A]).double()


@settings(max_examples=60, deadline=None)
@given(federations())
def test_split_is_the_dense_mean_and_its_nearest_product(federation):
    pairs, weights = federation
    dense, split = dense_mean(pairs, weights), mean_of_products(pairs, weights)
    assert split.a.shape == pairs[0][0].shape
    assert split.b.shape == pairs[0][1].shape
    # Eckart and Young: no product of this rank comes nearer than what the singular values leave.
    left = torch.linalg.svdvals(dense)[len(split.a) :]
    distance = float((split.b @ split.a - dense).norm())
    assert distance <= float(left.norm()) + 1e-12 + 1e-9 * float(dense.norm())
    assert math.isclose(math.sqrt(split.remainder_square), float(left.norm()), abs_tol=1e-9)
    assert math.isclose(math.sqrt(split.total_square), float(dense.norm()), rel_tol=1e-9, abs_tol=1e-9)


@settings(max_examples=60, deadline=None)
@given(federations())
def test_mean_reports_how_far_the_product_of_means_is_from_the_mean_of_products(federation):
    pairs, weights = federation
    averaged, dense = plain_mean(pairs, weights), dense_mean(pairs, weights)
    arrays, remainder = aggregate_lora(records(pairs), weights, averaged, mode="mean")
    assert arrays is averaged
    expected = float((product(averaged) - dense).norm())
    # Computed by way of inner products, whose rounding is its square root.
    assert math.isclose(remainder * float(dense.norm()), expected, rel_tol=1e-3, abs_tol=1e-6)


def test_project_replaces_factors_alone():
    torch.manual_seed(0)
    replies = [record(a=torch.randn(2, 5), b=torch.randn(4, 2), head=torch.randn(3)) for _ in range(3)]
    averaged = weighted_mean(replies, [1, 2, 3], [A, B, "head"])
    arrays, _ = aggregate_lora(replies, [1, 2, 3], averaged, mode="project")
    assert torch.equal(to_tensor(arrays["head"]), to_tensor(averaged["head"]))
    dense = dense_mean([(to_tensor(r[A]), to_tensor(r[B])) for r in replies], [1, 2, 3])
    assert float((product(arrays) - dense).norm()) < float((product(averaged) - dense).norm())
    assert list(arrays) == list(averaged)
    assert all(array.dtype == "float32" for array in arrays.values())


def test_frozen_a_and_very_many_clients_are_not_measured():
    replies = [record(b=torch.randn(4, 2)) for _ in range(2)]
    assert find_pairs([B]) == {}
    assert aggregate_lora(replies, [1, 1], replies[0], mode="mean")[1] is None
    assert not_projectable({B: (4, 2)}) == ["no pair of lora_A and lora_B is trained"]
    table = "base_model.model.embed.lora_embedding_A.default"
    assert find_pairs([B, A, table, table.replace("_A.", "_B."), "lora_A.weight", "head"]) == {
        A: B,
        table: table.replace("_A.", "_B."),
    }
    reply = record(a=torch.ones(2, 3), b=torch.ones(4, 2))
    assert aggregate_lora([reply] * 128, [1] * 128, reply, mode="mean")[1] == pytest.approx(0, abs=1e-6)
    assert aggregate_lora([reply] * 129, [1] * 129, reply, mode="mean")[1] is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.conv.lora_A.default.weight", (2, 3, 1, 1)),
        ("model.q_proj.lora_magnitude_vector.default.weight", (4,)),
        ("model.q_proj.lora_E.default", (2, 1)),
        ("model.q_proj.lora_A.default", (2, 4)),
    ],
)
def test_what_is_no_plain_product_is_refused_by_name(name, shape):
    shapes = {A: (2, 4), B: (4, 2), "model.q_proj.lora_B.default.bias": (4,), "head.weight": (2, 2)}
    assert not_projectable(shapes) == []
    (reason,) = not_projectable(shapes | {name: shape})
    assert reason.startswith(name)


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [1], [1, math.inf], [1, math.nan]])
def test_weights_without_a_mean_are_an_error(weights):
    with pytest.raises(FederatedError, match="numbers of examples"):
        mean_of_products([(torch.ones(1, 2), torch.ones(2, 1))] * 2, weights)
