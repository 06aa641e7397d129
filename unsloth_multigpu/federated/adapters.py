"""The tensors that server and clients exchange, and how LoRA adapters are described and saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import nn

from unsloth_multigpu.errors import FederatedError
from unsloth_multigpu.federated.aggregation import find_pairs, partner_of, to_array, to_tensor
from unsloth_multigpu.group.replicas import persistent_buffers

_RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def exchanged_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the trainable parameters, then `exchanged_buffers`, in the model's order. They are not copied.

    A tied weight occurs once, under its first name. Raises FederatedError if no parameter is trainable.
    """
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trainable:
        raise FederatedError(
            f"The model of model_builder ({type(model).__name__}) has no trainable parameter.",
            hint="Return a model with a parameter that requires a gradient, for example with a LoRA adapter.",
        )
    return trainable | exchanged_buffers(model)


def exchanged_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the persistent buffers; of a quantized model, whose weights may be buffers, running statistics only."""
    buffers = dict(persistent_buffers(model))
    if is_quantized(model):
        return {name: value for name, value in buffers.items() if name.endswith(_RUNNING_STATISTICS)}
    return buffers


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Copies tensors to arrays, half precision as float32. Raises FederatedError if a value is infinite or NaN."""
    broken = [name for name, value in tensors.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise FederatedError(
            f"{broken[0]} is infinite or NaN in the client's model (and {len(broken) - 1} more tensors).",
            hint="Lower the client's learning rate or clip its gradients. Before the first round, check model_builder.",
        )
    return ArrayRecord({name: to_array(value) for name, value in tensors.items()})


@torch.no_grad()
def write_arrays(tensors: Mapping[str, torch.Tensor], arrays: ArrayRecord) -> None:
    """Writes each array to the tensor of its name, or none: FederatedError if names or shapes differ."""
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
        # Means of integers, such as counters, are rounded.
        is_mean = value.is_floating_point() and not (tensor.is_floating_point() or tensor.is_complex())
        tensor.copy_(value.round() if is_mean else value)


def is_quantized(model: nn.Module) -> bool:
    """True if Hugging Face's `is_quantized` is set, or a weight is a quantized tensor."""
    return bool(getattr(model, "is_quantized", False)) or any(map(_is_packed, model.parameters()))


def _is_packed(tensor: torch.Tensor) -> bool:
    """True for integers, 8-bit floats and tensor classes of quantization libraries."""
    classes = {type(tensor), type(tensor.data)} - {torch.Tensor, nn.Parameter}
    foreign = any(cls.__module__.split(".")[0] in ("bitsandbytes", "torchao", "hqq", "optimum") for cls in classes)
    return foreign or tensor.element_size() == 1 or not (tensor.is_floating_point() or tensor.is_complex())


def not_projectable(model: nn.Module, exchanged: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns why lora_aggregation="project" cannot work: a line for each tensor that is no factor of a plain B A."""
    pairs = find_pairs(exchanged)
    reasons = [] if pairs else ["no pair of lora_A and lora_B is trained"]
    for name, value in exchanged.items():
        if "lora_" not in name or (".lora_B." in name and name.endswith(".bias")):
            continue
        if not partner_of(name):
            reasons.append(f"{name} is not a factor of a plain LoRA product (DoRA and AdaLoRA have such tensors)")
        elif value.dim() != 2:
            reasons.append(f"{name} has shape {tuple(value.shape)}: the product of such factors is not a matrix")
    for name in pairs:
        path, _, rest = name.rpartition(".lora_")
        layer: Any = model.get_submodule(path)
        adapter = rest.removesuffix(".weight").split(".")[-1]
        if kind := getattr(layer, "lora_variant", {}).get(adapter):
            reasons.append(f"{name} belongs to the LoRA variant {type(kind).__name__}")
        elif hasattr(layer, "parameter_name") and getattr(layer, "num_experts", 1) > 1:
            reasons.append(f"{name} has the factors of several experts")  # target_parameters
    return reasons


def describe_adapter(model: nn.Module) -> str:
    """Returns name and configuration of the active adapter as JSON; "" without an adapter, or if several are active."""
    configs: Any = getattr(model, "peft_config", None)
    names: list[str] = list(model.active_adapters) if configs else []  # type: ignore[arg-type]
    if len(names) != 1:
        return ""
    config = configs[names[0]].to_dict() | {"inference_mode": True}
    return json.dumps({"name": names[0], "config": config}, default=list)  # PEFT has sets of module names.


def adapter_settings(adapter_config: str) -> dict[str, str]:
    """Returns the repr of each setting in the result of `describe_adapter` that must be equal after a resume."""
    config = json.loads(adapter_config)["config"] if adapter_config else {}
    config.pop("peft_version", None)
    # Lists that were sets of names have any order.
    return {name: repr(sorted(value) if isinstance(value, list) else value) for name, value in config.items()}


def frozen_factors(model: nn.Module, exchanged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the frozen factors A or B whose partner is trained: saved with the adapter, but not exchanged."""
    partners = {partner_of(name) for name in exchanged} - exchanged.keys()
    return {name: value for name, value in model.named_parameters() if name in partners}


def save_adapter(folder: Path, arrays: Mapping[str, torch.Tensor], adapter_config: str) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` for PEFT, without a model.

    `arrays` are the global tensors, and `frozen_factors`, for which PEFT would otherwise draw new values;
    `adapter_config` is the result of `describe_adapter`. Other trained tensors (biases, norms) are written, too; PEFT
    loads them into the base model.
    """
    from safetensors.torch import save_file

    described = json.loads(adapter_config)
    infix = f".{described['name']}"
    kept = {_name_on_disk(name, infix): value.contiguous() for name, value in arrays.items()}
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(described["config"], indent=2, sort_keys=True), encoding="utf-8"
    )


def _name_on_disk(name: str, infix: str) -> str:
    if f".modules_to_save{infix}" in name:
        return name.replace(f".modules_to_save{infix}", "")
    head, _, tail = name.rpartition(infix)
    return head + tail
