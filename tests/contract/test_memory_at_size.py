"""The forecast of memory at the sizes of real models: a step on fake tensors, which have shapes and no values.

The model, autograd, `fully_shard` and accelerate's way to divide a model are the real ones; the ranks' group is torch's
fake one, which sends nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from tests.helpers.allocated import Allocated, bytes_of
from unsloth_multigpu.shard import activation
from unsloth_multigpu.shard.describe import describe_decoder, describe_tensors
from unsloth_multigpu.shard.description import Description, Training
from unsloth_multigpu.shard.groups import grouped
from unsloth_multigpu.shard.memory import MemoryForecast, forecast_memory

SIZES = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
# Tokens whose logits a loss in chunks has at a time, in these tests.
FEW = 2
THOROUGH = pytest.mark.thorough


@dataclass(frozen=True)
class SetUp:
    """A training of Llama 3's sizes.

    Args:
        size: Key of `SIZES`.
        flags: lora, checkpointing, autocast, tied, chunks (of the loss).
        tokens: Of one row.
        num_ranks: 1 = not sharded.
        accumulation: Micro-batches of a rank's step.
        num_layers: Fewer than the model has.
    """

    size: str
    flags: str
    tokens: int
    num_ranks: int = 1
    accumulation: int = 1
    num_layers: int | None = None

    def __str__(self) -> str:
        layers = f", {self.num_layers} layers" if self.num_layers else ""
        return f"{self.size}{layers}, {self.flags or 'full'}, {self.tokens}, {self.num_ranks}x{self.accumulation}"


QUICK = (
    SetUp("8B", "lora checkpointing", 2048, num_layers=2),
    SetUp("1B", "autocast", 2048, num_layers=2, accumulation=2),
    SetUp("1B", "checkpointing autocast", 2048, 8, num_layers=4),
    SetUp("1B", "checkpointing", 256, 8, 2, num_layers=4),
    SetUp("1B", "tied", 256, 2, num_layers=4),
    SetUp("1B", "lora checkpointing", 2048, 2, num_layers=2),
)
WHOLE = (
    *(SetUp(size, flags, 2048) for size in SIZES for flags in ("", "checkpointing", "lora", "lora checkpointing")),
    *(SetUp("8B", flags, 8192, 1, 2) for flags in ("lora checkpointing chunks", "checkpointing autocast chunks")),
    *(SetUp("8B", flags, 2048, n) for flags in ("checkpointing", "checkpointing autocast") for n in (2, 8)),
    *(SetUp("8B", "lora checkpointing", 2048, n) for n in (2, 8)),
    *(SetUp("8B", f"checkpointing chunks{flags}", 8192, 8) for flags in ("", " autocast", " lora")),
    *(SetUp("1B", flags, tokens, 8, 2) for flags in ("", "checkpointing tied") for tokens in (256, 2048)),
)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group of so many ranks, of which there is one."""
    if request.param == 1:
        yield 1
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    try:
        yield request.param
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("set_up", "ranks"),
    [pytest.param(s, s.num_ranks, id=str(s)) for s in QUICK]
    + [pytest.param(s, s.num_ranks, id=str(s), marks=THOROUGH) for s in WHOLE],
    indirect=["ranks"],
)
def test_forecast_is_what_a_step_allocates(
    set_up: SetUp, ranks: int, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(activation, "_CHUNK_TOKENS", FEW)
    # accelerate's plugin sets it.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    # Without padding, which cannot be seen in a mask without values.
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *args, **kwargs: None)
    model = model_of(set_up)
    wanted = forecast_of(set_up, model)
    if set_up.num_ranks > 1:
        shard(model, set_up)
    states_bytes, peak = measured(set_up, model)

    seen = states_bytes + peak
    record_property("forecast by seen", wanted.allocated / seen)
    print(f"{set_up}: {seen / 2**30:.1f} GiB, forecast by seen {wanted.allocated / seen:.3f}")
    assert wanted.weights + wanted.optimizer == pytest.approx(states_bytes, rel=0.001)
    # Never much less, of which a card would run out.
    assert 0.92 < wanted.allocated / seen < 1.15


def model_of(set_up: SetUp) -> Any:
    """Of shapes alone, on the meta device."""
    sizes = dict(SIZES[set_up.size])
    if set_up.num_layers:
        sizes["num_hidden_layers"] = set_up.num_layers
    tied = "tied" in set_up.flags
    is_fp32 = "autocast" in set_up.flags
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))
        model.to(torch.float32 if is_fp32 else torch.bfloat16)
        if "lora" in set_up.flags:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    if "checkpointing" in set_up.flags:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if "lora" in set_up.flags:
            model.enable_input_require_grads()
    return model.train()


def forecast_of(set_up: SetUp, model: Any) -> MemoryForecast:
    tensors, units = describe_tensors(model)
    training = Training(
        "adamw_torch_fused",
        rows=1,
        tokens=set_up.tokens,
        autocast="bfloat16" if "autocast" in set_up.flags else "",
        checkpointing="on" if "checkpointing" in set_up.flags else "off",
        accumulation=set_up.accumulation,
        loss="in chunks" if "chunks" in set_up.flags else "whole logits",
        keeps_batch=False,
    )
    description = Description("Llama", tensors, describe_decoder(model), training, units)
    return forecast_memory(description, "sharded" if set_up.num_ranks > 1 else "ddp", set_up.num_ranks)


def shard(model: Any, set_up: SetUp) -> None:
    """As accelerate does."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    is_mixed = "autocast" in set_up.flags
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if is_mixed else None
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
        mixed_precision_policy=policy,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=init_device_mesh("cpu", (set_up.num_ranks,), mesh_dim_names=("shard",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shard",)),
        mixed_precision="bf16" if is_mixed else "no",
        is_main_process=True,
        device=torch.device("cpu"),
    )
    with grouped(model, plugin):
        fsdp2_prepare_model(accelerator, model)


def measured(set_up: SetUp, model: Any) -> tuple[int, int]:
    """Bytes of weights, buffers and the optimizer's states, and of all that the second step has beside them."""
    with FakeTensorMode(allow_non_fake_inputs=True), Allocated() as allocated:
        materialise(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        ids = torch.randint(0, 1000, (1, set_up.tokens))
        step(set_up, model, ids, optimizer)
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        there = [*model.parameters(), *model.buffers(), *states]
        allocated.leave_out([*there, ids])
        step(set_up, model, ids, optimizer)
    return bytes_of(there), allocated.peak


def materialise(model: torch.nn.Module) -> None:
    """Puts fake tensors in the place of the model's own, which are on the meta device."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in [*module._buffers.items()]:
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        for name, parameter in [*module._parameters.items()]:
            if parameter is not None and not hasattr(parameter, "_local_tensor"):
                fake = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), fake)
    if not made:
        model.to_empty(device="cpu")


def step(set_up: SetUp, model: Any, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    is_sharded = set_up.num_ranks > 1
    is_mixed = "autocast" in set_up.flags
    for i in range(set_up.accumulation):
        if is_sharded:
            model.set_requires_gradient_sync(i == set_up.accumulation - 1)
        with torch.autocast("cpu", torch.bfloat16) if is_mixed else contextlib.nullcontext():
            if "chunks" in set_up.flags:
                loss = model(input_ids=ids, use_cache=False, logits_to_keep=FEW).logits.float().sum()
            else:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
