"""The tensors that server and clients exchange, trainable parameters and persistent buffers. Saves LoRA adapters."""

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
    """Returns the trainable parameters, then the persistent buffers, not copied, in the model's order.

    A tied weight occurs once, under its first name. In a quantized model only running statistics count as buffers,
    because its frozen weights are buffers, too.
    """
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trainable:
        raise FederatedError(
            f"The model of model_builder ({type(model).__name__}) has no trainable parameter.",
            hint="Return a model with requires_grad=True somewhere, for example with a LoRA adapter.",
        )
    return trainable | exchanged_buffers(model)


def exchanged_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the persistent buffers that training may change."""
    buffers = dict(persistent_buffers(model))
    if is_quantized(model):
        return {name: value for name, value in buffers.items() if name.endswith(_RUNNING_STATISTICS)}
    return buffers


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Copies tensors to Flower's arrays. Raises FederatedError for a value that is infinite or NaN."""
    broken = [name for name, value in tensors.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise FederatedError(
            f"{broken[0]} is infinite or NaN after the client's training (and {len(broken) - 1} more tensors).",
            hint="Lower the client's learning rate, or clip its gradients.",
        )
    return ArrayRecord({name: to_array(value) for name, value in tensors.items()})


@torch.no_grad()
def write_arrays(tensors: Mapping[str, torch.Tensor], arrays: ArrayRecord) -> None:
    """Writes each array to the tensor of its name.

    Raises FederatedError if names or shapes differ. Nothing was written then.
    """
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
        # A mean of integer counters is rounded.
        is_mean = value.is_floating_point() and not (tensor.is_floating_point() or tensor.is_complex())
        tensor.copy_(value.round() if is_mean else value)


def is_quantized(model: nn.Module) -> bool:
    """True if Hugging Face's `is_quantized` is set, or a weight is a quantized tensor."""
    return bool(getattr(model, "is_quantized", False)) or any(map(_is_packed, model.parameters()))


def _is_packed(tensor: torch.Tensor) -> bool:
    """True for packed integers, 8-bit floats and tensor classes of quantization libraries."""
    kinds = {type(tensor), type(tensor.data)} - {torch.Tensor, nn.Parameter}
    foreign = any(kind.__module__.split(".")[0] in ("bitsandbytes", "torchao", "hqq", "optimum") for kind in kinds)
    return foreign or not tensor.is_floating_point() or tensor.element_size() == 1


def not_projectable(model: nn.Module, exchanged: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns reasons why lora_aggregation="project" cannot work: tensors that are no factors of a plain B A."""
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
    """Returns the adapter's configuration as JSON for `save_adapter`; "" without exactly one active adapter."""
    configs: Any = getattr(model, "peft_config", None)
    names: list[str] = list(model.active_adapters) if configs else []  # type: ignore[arg-type]
    if len(names) != 1:
        return ""
    config = configs[names[0]].to_dict() | {"inference_mode": True}
    return json.dumps({"name": names[0], "config": config}, default=list)  # Names of modules are a set.


def adapter_settings(adapter_config: str) -> dict[str, str]:
    """Returns what must be equal after a resume, as texts by name, from the result of `describe_adapter`."""
    config = json.loads(adapter_config)["config"] if adapter_config else {}
    config.pop("peft_version", None)
    # PEFT writes sets of names as lists, in any order.
    return {name: repr(sorted(value) if isinstance(value, list) else value) for name, value in config.items()}


def frozen_factors(model: nn.Module, exchanged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns frozen factors A or B whose partner is trained. They are not exchanged, but saved with the adapter."""
    partners = {partner_of(name) for name in exchanged} - exchanged.keys()
    return {name: value for name, value in model.named_parameters() if name in partners}


def save_adapter(folder: Path, arrays: Mapping[str, torch.Tensor], adapter_config: str) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` for PEFT, without a model.

    `arrays` are the global state and `frozen_factors`, which PEFT would else initialize; `adapter_config` is the result
    of `describe_adapter`. Other trained tensors (biases, norms) are written, too; PEFT loads them into the base model.
    """
    from safetensors.torch import save_file

    described = json.loads(adapter_config)
    mark = f".{described['name']}"
    kept = {_name_on_disk(name, mark): value.contiguous() for name, value in arrays.items()}
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(described["config"], indent=2, sort_keys=True), encoding="utf-8"
    )


def _name_on_disk(name: str, mark: str) -> str:
    if f".modules_to_save{mark}" in name:
        return name.replace(f".modules_to_save{mark}", "")
    head, _, tail = name.rpartition(mark)
    return head + tail
