"""What travels between the server and its clients, a model's trainable tensors and persistent buffers; LoRA layers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import nn

from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.aggregation import (
    find_pairs,
    not_projectable,
    partner_of,
    to_array,
    to_tensor,
)

_RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def travelling_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Trainable parameters, then persistent buffers: the tensors themselves, in the model's order.

    A tied weight counts once, under its first name. Of a quantised model only running statistics count as buffers: its
    frozen weights are buffers, too.
    """
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trainable:
        raise FederatedError(
            f"The model of model_builder ({type(model).__name__}) has no trainable parameter.",
            hint="Return a model with requires_grad=True somewhere, for example with a LoRA adapter.",
        )
    return trainable | travelling_buffers(model)


def travelling_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers that training may change."""
    buffers = dict(model.named_buffers())
    if is_quantized(model):
        return {name: value for name, value in buffers.items() if name.endswith(_RUNNING_STATISTICS)}
    kept = model.state_dict().keys() if buffers else ()
    return {name: value for name, value in buffers.items() if name in kept}


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Flower's arrays, copies on the CPU. Raises FederatedError naming a tensor with a value that is no number."""
    broken = [name for name, value in tensors.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise FederatedError(
            f"{broken[0]} is infinite or no number after the client's training (and {len(broken) - 1} more tensors).",
            hint="Lower the client's learning rate, or clip its gradients.",
        )
    return ArrayRecord({name: to_array(value) for name, value in tensors.items()})


@torch.no_grad()
def write_arrays(tensors: Mapping[str, torch.Tensor], arrays: ArrayRecord) -> None:
    """Writes each array into the tensor of its name; raises FederatedError, and writes nothing, where one differs."""
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    there = {name: tuple(array.shape) for name, array in arrays.items()}
    for name in here | there:
        if here.get(name) != there.get(name):
            raise FederatedError(
                f"The shape of {name} is {there.get(name)} on the server and {here.get(name)} in this model.",
                hint="All clients and the server need the same model_builder and library versions.",
            )
    for name, tensor in tensors.items():
        value = to_tensor(arrays[name])
        # A mean of counters is no whole number.
        is_mean = value.is_floating_point() and not (tensor.is_floating_point() or tensor.is_complex())
        tensor.copy_(value.round() if is_mean else value)


def layout_of(model: nn.Module) -> list[str]:
    """What has to be equal on all clients, one "name: value" each.

    Shapes of parameters, frozen ones included (adapters fit one another although the vocabularies of their base models
    differ), and the factor of each LoRA layer. A quantised weight counts with the shape that it had before.
    """
    lines = [f"{name}: {_logical_shape(value)}" for name, value in model.named_parameters()]
    for name, module in model.named_modules():
        factors = getattr(module, "scaling", None)  # PEFT: adapter name -> factor.
        if isinstance(factors, dict) and hasattr(module, "lora_A"):
            lines += [f"{name} LoRA factor of {adapter}: {float(factor)!r}" for adapter, factor in factors.items()]
    return lines


def layout_difference(here: Sequence[str], there: Sequence[str]) -> str:
    """The first line in which two layouts differ, "" where they are equal."""
    mine, its = (dict(line.rsplit(": ", 1) for line in lines) for lines in (here, there))
    names = [name for name in its | mine if mine.get(name) != its.get(name)]
    return f"{names[0]} is {mine.get(names[0])} here, {its.get(names[0])} there" if names else ""


def is_quantized(model: nn.Module) -> bool:
    """True where Hugging Face says so, or a weight is one of bitsandbytes or torchao."""
    return bool(getattr(model, "is_quantized", False)) or any(map(is_quantized_tensor, model.parameters()))


def is_quantized_tensor(tensor: torch.Tensor) -> bool:
    """No plain floating point weight: packed integers, 8-bit floats, or a library's own kind of tensor."""
    kinds = {type(tensor), type(tensor.data)} - {torch.Tensor, nn.Parameter}
    foreign = any(kind.__module__.split(".")[0] in ("bitsandbytes", "torchao", "hqq", "optimum") for kind in kinds)
    return foreign or not tensor.is_floating_point() or tensor.element_size() == 1


def _logical_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    packed = getattr(tensor, "quant_state", None)  # bitsandbytes packs two 4-bit values into a byte.
    return tuple(tensor.shape if packed is None else packed.shape)


def variants(model: nn.Module, travelling: Mapping[str, torch.Tensor]) -> list[str]:
    """Why B A is not what an adapter adds, as far as names and shapes tell, and PEFT's layers themselves."""
    reasons = not_projectable({name: tuple(value.shape) for name, value in travelling.items()})
    for name in find_pairs(travelling):
        layer, adapter = lora_layer(model, name)
        if kind := getattr(layer, "lora_variant", {}).get(adapter):
            reasons.append(f"{name} belongs to the LoRA variant {type(kind).__name__}")
        elif hasattr(layer, "parameter_name") and getattr(layer, "num_experts", 1) > 1:
            reasons.append(f"{name} holds the factors of several experts")  # target_parameters
    return reasons


def lora_layer(model: nn.Module, name_a: str) -> tuple[Any, str]:
    """The PEFT layer that owns a factor of this name, and the adapter's name."""
    path, _, rest = name_a.rpartition(".lora_")
    return model.get_submodule(path), rest.removesuffix(".weight").split(".")[-1]


def describe_adapter(model: nn.Module) -> str:
    """What `save_adapter` needs, as JSON; "" for what is no PEFT model with one active adapter."""
    configs: Any = getattr(model, "peft_config", None)
    names: list[str] = list(model.active_adapters) if configs else []  # type: ignore[arg-type]
    if len(names) != 1:
        return ""
    with TemporaryDirectory() as folder:
        configs[names[0]].save_pretrained(folder)
        config = json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8"))
    return json.dumps({"name": names[0], "config": config | {"inference_mode": True}})


def frozen_factors(model: nn.Module, travelling: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A or B where only the other is trained: they stay where they are, and the adapter on the disk needs them."""
    partners = {partner_of(name) for name in travelling} - travelling.keys()
    return {name: value for name, value in model.named_parameters() if name in partners}


def save_adapter(folder: Path, arrays: Mapping[str, torch.Tensor], adapter_config: str) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, which PEFT loads; needs no model.

    Args:
        arrays: The global state and `frozen_factors`. What is trained besides the adapter (biases, norms) is written,
            too: PEFT loads it into the base model.
        adapter_config: The text of `describe_adapter`.

    Raises:
        FederatedError: One of A and B is missing: PEFT would initialize it again when it loads the adapter.
    """
    from safetensors.torch import save_file

    described = json.loads(adapter_config)
    if missing := sorted({partner for name in arrays if (partner := partner_of(name))} - arrays.keys()):
        raise FederatedError(
            f"{missing[0]} is not among the tensors of the adapter to be saved.",
            hint="Pass what does not train (frozen A) as well.",
        )
    mark = f".{described['name']}"
    kept = {_name_on_disk(name, mark): value.contiguous() for name, value in arrays.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(described["config"], indent=2, sort_keys=True), encoding="utf-8"
    )


def _name_on_disk(name: str, mark: str) -> str:
    if f".modules_to_save{mark}" in name:
        return name.replace(f".modules_to_save{mark}", "")
    head, _, tail = name.rpartition(mark)
    return head + tail
