"""What is decided about a sharded training before an engine has one."""

import copy
import logging
import os
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.helpers.board import manager_of, session_of
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import Engine, is_entered_below, tried_pass, whole_of
from unsloth_multigpu.hooks.shard import _store_in_float_dtype, ask_accelerate_to_shard, ask_unsloth_to_shard
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.shard import count, script_probe, sharding
from unsloth_multigpu.shard.memory import GIB, StepBytes, Training, forecast_of
from unsloth_multigpu.shard.quantized import WithheldQuantState, check_rows, keep_rows, partial_layers, restore_states
from unsloth_multigpu.shard.script_probe import Answer
from unsloth_multigpu.shard.sharding import check_is_sharded, check_options, check_shared, check_versions, layers_of
from unsloth_multigpu.train.trainer import DDPTrainer


class Fails(torch.nn.Module):
    """Raises in the forward or in the backward pass, while it is told to."""

    def __init__(self):
        super().__init__()
        self.now = ""
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x):
        def raise_():
            raise ValueError(f"{self.now} fails")

        x = self.second(x)
        if self.now == "forward":
            raise_()
        if self.now == "backward":
            x.register_hook(lambda _: raise_())
        return self.first(x)


def shard(model, layers):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for part in (layers, model):
        fully_shard(part, mesh=mesh)


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("now", ["forward", "backward"])
def test_sharded_model_computes_as_before_after_a_pass_that_raised(now):
    torch.manual_seed(0)
    model, x = Fails(), torch.ones(3, 2)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    shard(model, model.second)
    model.now = now
    if not hasattr(model, "reset_iter_state"):
        pytest.skip("needs reset_iter_state, which torch 2.13 has")

    with pytest.raises(ValueError, match=f"{now} fails"), tried_pass(model):
        model(x).sum().backward()
    assert all(type(p.data).__name__ == "DTensor" for p in model.parameters())
    model.now = ""
    for _ in range(2):
        with tried_pass(model):
            model(x).sum().backward()
        for p, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(whole_of(p.grad), gradient)
            p.grad = None


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("is_together", [False, True])
def test_module_that_is_called_without_its_sharded_model_is_known_by_the_error(is_together):
    model, x = Fails(), torch.ones(3, 2)
    shard(model, [model.first, model.second] if is_together else model.second)
    with pytest.raises(RuntimeError) as info:
        model(model.second(x))
    assert is_entered_below(info.value)
    assert not is_entered_below(RuntimeError("out of memory"))


def test_fsdp_1_is_left_alone_and_the_step_is_told(caplog):
    trainer = FakeTrainer()
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    steered = DDPTrainer(trainer, session_of(manager_of(None, 0, 2)))
    with caplog.at_level(logging.WARNING):
        assert steered.run(lambda: "trained") == "trained"
    assert "An optimizer step sees 4 samples (2 ranks x 2), 2 times those of one process" in caplog.text
    assert "FSDP 2 (fsdp_config={'version': 2}) keeps it" in caplog.text


@pytest.mark.parametrize("options", [{"strategy": "local_sgd"}, {"strategy": "allreduce"}])
def test_options_of_ddp_are_refused_where_the_script_itself_shards(options):
    with pytest.raises(SetupError, match="is not possible: FSDP2 of accelerate shards the model"):
        check_options(MultiGPUConfig(**options), Engine.ACCELERATE)
    check_options(MultiGPUConfig(), Engine.ACCELERATE)
    with pytest.raises(SetupError, match="a Trainer would save only rank 0's shard"):
        check_options(MultiGPUConfig(), Engine.TRANSFORMERS)


def test_model_of_which_nothing_is_sharded_is_refused():
    with pytest.raises(SetupError, match="no weight of Linear is sharded: every rank has the whole model"):
        check_is_sharded(torch.nn.Linear(2, 2))
    with pytest.raises(SetupError, match="no weight of the model is sharded"):
        check_is_sharded(None)


def test_older_versions_are_refused(monkeypatch):
    monkeypatch.setattr("unsloth_multigpu.versions.installed_version", lambda _: None)
    check_versions("torch")
    monkeypatch.setattr("unsloth_multigpu.versions.installed_version", lambda _: "2.6.0")
    with pytest.raises(SetupError, match=r"shard='on' needs torch>=2.7, and 2.6.0 is installed"):
        check_versions("torch")
    # A plan has no rows of what would be refused.
    assert count._only_whole("adamw_torch", 1) == (
        "shard='on' needs torch>=2.7, and 2.6.0 is installed",
        "Upgrade torch, or leave shard out.",
    )


@pytest.mark.parametrize(
    ("fsdp", "config", "offload", "expected"),
    [
        (None, {"a": True}, False, (True, {"version": 2, "reshard_after_forward": True, "a": True})),
        (None, "fsdp.json", True, (True, {"version": 2, "reshard_after_forward": True, "b": 1, "cpu_offload": True})),
        (True, {"version": 1}, False, (True, {"version": 1})),
        ("full_shard", {"version": 2}, True, ("full_shard", {"version": 2, "cpu_offload": True})),
    ],
)
def test_accelerate_is_asked_and_arguments_of_the_script_stay(monkeypatch, tmp_path, fsdp, config, offload, expected):
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp.json").write_text('{"b": 1}')
    args = SimpleNamespace(fsdp=fsdp, fsdp_config=config)
    ask_accelerate_to_shard(args, offload=offload)
    assert (args.fsdp, args.fsdp_config) == expected
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace())
    theirs = SimpleNamespace(fsdp=fsdp, fsdp_config=config)
    ask_accelerate_to_shard(theirs, offload=offload)
    assert (theirs.fsdp, theirs.fsdp_config) == (fsdp, config)


def test_offload_is_not_asked_against_the_script(monkeypatch):
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    with pytest.raises(SetupError, match="fsdp_config of TrainingArguments says cpu_offload=False"):
        ask_accelerate_to_shard(SimpleNamespace(fsdp=True, fsdp_config={"cpu_offload": False}), offload=True)
    monkeypatch.setenv("UNSLOTH_FSDP2_CPU_OFFLOAD", "0")
    with ExitStack() as stack, pytest.raises(SetupError, match="True, but UNSLOTH_FSDP2_CPU_OFFLOAD='0'"):
        ask_unsloth_to_shard(stack, offload=True)


def test_a_closed_session_asks_no_library_to_shard(monkeypatch):
    names = "UNSLOTH_FSDP2_CPU_OFFLOAD", "ACCELERATE_USE_FSDP", "UNSLOTH_FSDP2"
    for name in names[:2]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(names[2], "1")
    with ExitStack() as on_close:
        ask_unsloth_to_shard(on_close)
        assert "UNSLOTH_FSDP2_CPU_OFFLOAD" not in os.environ
        ask_unsloth_to_shard(on_close, offload=True)
        assert os.environ["UNSLOTH_FSDP2_CPU_OFFLOAD"] == "1"
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # As transformers does for a sharded Trainer.
    assert [os.environ.get(name) for name in names] == [None, None, "1"]


@pytest.mark.parametrize(
    ("given", "is_4bit", "stored"),
    [(torch.uint8, True, torch.bfloat16), (torch.float16, True, torch.float16), (torch.uint8, False, torch.uint8)],
)
def test_4bit_weights_are_packed_in_a_type_that_can_be_sharded(monkeypatch, given, is_4bit, stored):
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    config = SimpleNamespace(load_in_4bit=is_4bit, bnb_4bit_quant_storage=given, bnb_4bit_compute_dtype=torch.bfloat16)
    _store_in_float_dtype(lambda _: None, config)
    assert config.bnb_4bit_quant_storage == stored


def test_optimizer_that_cannot_train_parts_is_known_before_the_first_step():
    names = ["adamw_torch_fused", "sgd", "adamw_8bit", "paged_adamw_32bit", "lion_8bit", "rmsprop_bnb", "adafactor"]
    for engine, num_trained in ((Engine.ACCELERATE, 2), (Engine.UNSLOTH, 4)):
        for name in names[:num_trained]:
            sharding.check_optimizer(name, engine)
        for name in names[num_trained:]:
            with pytest.raises(SetupError, match=f"optim='{name}' cannot train weights .* FSDP2 of {engine.value}"):
                sharding.check_optimizer(name, engine)


def chosen(monkeypatch, device_gib, *, offload=False, **options):
    """What `shard="auto"` becomes for a training that needs 19 GiB with DDP and 8.3 on 8 ranks, 1.9 of it its part."""
    training = Training("Llama", 8, 1, 0, "adamw_torch_fused", "", True, 1, 2048, 64, offload=offload)
    whole = StepBytes(15 * GIB, 0, GIB // 4, GIB // 2, 3 * GIB, 0)
    part = StepBytes(2 * GIB, int(1.8 * GIB), GIB // 32, GIB // 16, 5 * GIB, 0)
    rows = forecast_of(whole, training, "ddp", 8), forecast_of(part, training, "sharded", 8)
    answer = Answer(training, rows, device_bytes=int(device_gib * GIB))
    monkeypatch.setattr(script_probe, "ask", lambda command, environment, question: answer)
    return script_probe.choose_shard(["python", "train.py"], {}, MultiGPUConfig(shard="auto", **options), 8)


def test_auto_shards_where_the_model_does_not_fit_whole(monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        assert [chosen(monkeypatch, gib) for gib in (80, 16)] == ["off", "on"]
    assert "GiB of 80: not sharded" in caplog.text
    assert "GiB of 16, sharded over 8 ranks" in caplog.text
    # 8.3 GiB of 7.6 that can be planned for, and 6.4 where 1.9 of them are on the host.
    with pytest.raises(SetupError, match=r"sharded over 8 ranks 8\.3"):
        chosen(monkeypatch, 9)
    assert chosen(monkeypatch, 9, offload=True) == "on"
    with pytest.raises(SetupError, match="several nodes"):
        chosen(monkeypatch, 80, nnodes=2, rdzv_endpoint="host:1", rdzv_id="job")
    assert MultiGPUConfig(shard="auto", shard_offload=True).with_shard("on").shard_offload
    assert not MultiGPUConfig(shard="auto", shard_offload=True).with_shard("off").shard_offload


class Block(torch.nn.Linear):
    pass


class Embeddings(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(5, 4)


class Model(torch.nn.Module):
    """As transformers' are: embeddings inside of a class that is not split, layers and a head."""

    _no_split_modules = ("Embeddings", "Block", "BlockOfAnother")

    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = torch.nn.ModuleList(Block(4, 4) for _ in range(2))
        self.head = torch.nn.Linear(4, 5, bias=False)

    def get_input_embeddings(self):
        return self.embeddings.words

    def get_output_embeddings(self):
        return self.head


def test_layers_are_those_that_the_model_has_without_its_ends():
    assert layers_of(Model()) == ["Block"]
    assert layers_of(torch.nn.Linear(2, 2)) == []


def test_embeddings_and_head_alone_may_share_a_trained_weight():
    class Convolutions(Model):
        def get_input_embeddings(self):
            raise NotImplementedError

    check_shared(Convolutions())
    model = Model()
    model.head.weight = model.embeddings.words.weight
    check_shared(model)
    model.of_encoder = torch.nn.Embedding(5, 4)
    model.of_encoder.weight = model.embeddings.words.weight
    with pytest.raises(SetupError, match=r"Model: of_encoder\.weight and the embeddings share one weight"):
        check_shared(model)
    twice = Model()
    twice.layers[1].weight = twice.layers[0].weight
    with pytest.raises(SetupError, match=r"Model: layers\.0\.weight and layers\.1\.weight share one weight"):
        check_shared(twice)
    twice.layers[0].weight.requires_grad_(False)
    check_shared(twice)


class Packed(torch.nn.Module):
    """Has what bitsandbytes' layer has, around packed bytes."""

    def __init__(self, num_bytes):
        super().__init__()
        self.quant_state = SimpleNamespace(absmax=torch.ones(2), dtype=torch.bfloat16, moved_to=None)
        self.quant_state.to = lambda device: setattr(self.quant_state, "moved_to", device)
        packed = torch.nn.Parameter(torch.arange(num_bytes, dtype=torch.uint8)[:, None], requires_grad=False)
        packed.quant_state, packed.module, packed.quant_storage = self.quant_state, self, torch.uint8
        self.weight = packed


def test_nothing_computes_with_missing_rows_or_other_rows_until_they_are_given_back():
    layer = Packed(16)
    state = layer.quant_state
    keep_rows(layer.weight, torch.bfloat16, torch.device("cpu"), 0, 2)
    assert state.moved_to == torch.device("cpu")
    for held in (layer.weight.quant_state, copy.deepcopy(layer.quant_state)):
        assert isinstance(held, WithheldQuantState)
        assert held.dtype == torch.bfloat16
        with pytest.raises(SetupError, match="a shard of the 4-bit weights"):
            _ = held.absmax
    layer.quant_state.dtype = torch.float16  # As Unsloth sets it.
    assert state.dtype == torch.float16
    assert partial_layers(torch.nn.Sequential(layer)) == [layer]
    with pytest.raises(SetupError, match="has sharded them differently"):
        check_rows([layer], 0, 2)
    restore_states([layer])
    assert layer.weight.quant_state is layer.quant_state is state
    assert partial_layers(layer) == []
