"""Tensors of clients: dtypes, layouts and adapters on the disk; the mean of LoRA products against the dense mean."""

import copy
import math
import re

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
    not_projectable,
    save_adapter,
    to_arrays,
    write_arrays,
)
from unsloth_multigpu.federated.aggregation import (
    aggregate_lora,
    find_pairs,
    mean_of_products,
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
    for parameter in model.parameters():
        parameter.data.zero_()
    assert float(to_tensor(arrays["0.weight"]).abs().sum()) > 0  # A copy, not the model's own memory.
    write_arrays(exchanged_tensors(model), arrays)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in before.parameters()]
    assert not is_quantized(nn.ParameterList([*model.parameters(), torch.zeros(2, dtype=torch.complex64)]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"down_proj": 4}, "alpha_pattern": {"q_proj": 5}},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"modules_to_save": ["lm_head"], "lora_bias": True, "target_modules": ["down_proj"]},
        {"bias": "lora_only", "modules_to_save": ["norm"]},
        {"frozen": "lora_A"},
    ],
    ids=["plain", "patterns", "embedding", "bias-and-head", "own-biases-and-norms", "frozen-a"],
)
def test_adapter_that_peft_loads_from_the_disk_is_the_same_model(base, options, tmp_path):
    from peft import PeftModel

    if "lora_bias" in options or "bias" in options:
        base = _with_bias(base)
    frozen = options.get("frozen", "none")
    model = with_lora(base, **{name: value for name, value in options.items() if name != "frozen"})
    if options.get("bias") == "lora_only":
        model.base_model.model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad_(parameter.requires_grad and frozen not in name).requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)  # As training moves it.
    built, arrays = ClientModel(lambda: copy.deepcopy(model), 0), state_of(model)
    expected = logits(built.prepare(arrays, CPU))
    assert float((expected - logits(base)).abs().max()) > 1e-3
    kept = {name: to_tensor(array) for name, array in arrays.items()}
    kept |= {name: value.detach() for name, value in frozen_factors(model, kept).items()}
    assert any(frozen in name for name in kept) == ("frozen" in options)
    save_adapter(tmp_path, kept, describe_adapter(model))
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path))
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=2e-5)


def _with_bias(base):
    base = copy.deepcopy(base)
    for layer in base.model.layers:
        layer.mlp.down_proj.bias = nn.Parameter(torch.zeros(layer.mlp.down_proj.out_features))
    return base


def test_what_is_no_plain_product_is_refused_by_name(base):
    from peft import AdaLoraConfig, LoraConfig, get_peft_model

    def reasons(model):
        return not_projectable(model, exchanged_tensors(model))

    def adapted(layer, config, **options):
        return get_peft_model(nn.Sequential(layer), config(target_modules=["0"], **options))

    adalora = {"init_r": 2, "target_r": 1, "total_step": 10, "tinit": 1, "tfinal": 1}
    assert reasons(with_lora(base)) == []
    for model, reason in (
        (with_lora(base, use_dora=True), r"lora_magnitude_vector\.default\.weight is not a factor"),
        (adapted(nn.Linear(2, 3), AdaLoraConfig, **adalora), r"lora_E\.default is not a factor"),
        (adapted(nn.Conv2d(2, 3, 1), LoraConfig, r=2), r"lora_A\.default\.weight has shape \(2, 2, 1, 1\)"),
        (nn.Linear(2, 2), "no pair of lora_A and lora_B is trained"),
    ):
        assert any(re.search(reason, text) for text in reasons(model)), reasons(model)
    assert describe_adapter(nn.Linear(2, 2)) == describe_adapter(base) == ""


def test_four_bit_base_stays():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4", compute_dtype=torch.float32))
    model.to("cpu")  # bitsandbytes packs here.
    model = get_peft_model(model, LoraConfig(target_modules=["0"], r=2))
    model(torch.randn(2, 64))
    assert is_quantized(model)
    assert len(state_of(model)) == 2
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


def product(arrays):
    return to_tensor(arrays[B]).double() @ to_tensor(arrays[A]).double()


@settings(max_examples=60, deadline=None)
@given(federations())
def test_product_is_the_nearest_one_and_each_mode_reports_its_distance_from_the_dense_mean(federation):
    pairs, weights = federation
    replies, dense = [record(a=a, b=b) for a, b in pairs], dense_mean(pairs, weights)
    a, b = mean_of_products(pairs, weights)
    assert (a.shape, b.shape) == (pairs[0][0].shape, pairs[0][1].shape)
    # Eckart and Young: no product of this rank comes nearer than what the singular values leave.
    left = torch.linalg.svdvals(dense)[len(a) :]
    assert float((b @ a - dense).norm()) <= float(left.norm()) + 1e-12 + 1e-9 * float(dense.norm())
    for mode in ("mean", "project"):
        averaged = weighted_mean(replies, weights, [A, B])
        arrays, remainder = aggregate_lora(replies, weights, averaged, mode=mode)
        expected = float((product(arrays) - dense).norm())
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
    table = "base_model.model.embed.lora_embedding_A.default"
    pairs = {A: B, table: table.replace("_A.", "_B.")}
    assert find_pairs([*pairs.values(), "lora_A.weight", "head"]) == {}
    assert find_pairs([*pairs, *pairs.values()]) == pairs
    replies = [record(b=torch.randn(4, 2)) for _ in range(2)]
    assert aggregate_lora(replies, [1, 1], replies[0], mode="mean")[1] is None
    reply = record(a=torch.ones(2, 3), b=torch.ones(4, 2))
    assert aggregate_lora([reply] * 128, [1] * 128, reply, mode="mean")[1] == pytest.approx(0, abs=1e-6)
    assert aggregate_lora([reply] * 129, [1] * 129, reply, mode="mean")[1] is None


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [1], [1, math.inf], [1, math.nan]])
def test_weights_without_a_mean_are_an_error(weights):
    with pytest.raises(FederatedError, match="numbers of examples"):
        mean_of_products([(torch.ones(1, 2), torch.ones(2, 1))] * 2, weights)
