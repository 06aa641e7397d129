"""Tensors of tiny PEFT models on their way: dtypes, layouts, adapters on the disk."""

import copy

import pytest

pytest.importorskip("flwr", reason="Flower needs Python 3.11 or newer")

import torch
from torch import nn

from tests.helpers.tiny import build_tiny
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
from unsloth_multigpu.federated.aggregation import to_tensor
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
