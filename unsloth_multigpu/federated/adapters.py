"""What travels between the server and its clients: a model's trainable tensors and persistent buffers, by name."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from unsloth_multigpu.errors import FederatedError

_RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# NumPy has no bfloat16, and the server would average in half precision.
_HALF = (torch.bfloat16, torch.float16)
# Elements of a tensor that `look_at` takes at least, if there are that many.
_NUM_LOOKED_AT = 64


def travelling_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Trainable parameters, then persistent buffers: the tensors themselves, in the model's order.

    A tied weight counts once, under its first name. Of a quantised model only running statistics count as buffers: its
    frozen weights are buffers, too.

    Raises:
        FederatedError: No parameter is trainable.
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


def to_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    # Flower writes the bytes of an array down, so this is a copy where `.cpu()` is none.
    return Array((tensor.float() if tensor.dtype in _HALF else tensor).numpy())


def to_tensor(array: Array) -> torch.Tensor:
    return torch.as_tensor(array.numpy())


@torch.no_grad()
def write_arrays(tensors: Mapping[str, torch.Tensor], arrays: ArrayRecord) -> None:
    """Writes each array into the tensor of its name; nothing is written where one does not fit.

    Raises:
        FederatedError: Names or shapes differ.
    """
    unknown, missing = sorted(arrays.keys() - tensors.keys()), sorted(tensors.keys() - arrays.keys())
    if unknown or missing:
        number, name, lack = (len(unknown), unknown[0], "model") if unknown else (len(missing), missing[0], "server")
        raise FederatedError(
            f"{name} is not among the {lack}'s trainable tensors ({number} names differ).",
            hint="All clients and the server need the same model_builder and library versions.",
        )
    for name, tensor in tensors.items():
        if tuple(arrays[name].shape) != tuple(tensor.shape):
            raise FederatedError(
                f"{name} has shape {tuple(arrays[name].shape)} on the server and {tuple(tensor.shape)} in this model.",
                hint="All clients need the same model: the same vocabulary, layers and LoRA rank.",
            )
    for name, tensor in tensors.items():
        value = to_tensor(arrays[name])
        # A mean of counters is no whole number.
        is_mean = value.is_floating_point() and not (tensor.is_floating_point() or tensor.is_complex())
        tensor.copy_(value.round() if is_mean else value)


def frozen_layout(model: nn.Module) -> list[str]:
    """What has to be equal in addition to the travelling tensors, one "name: value" each.

    Shapes of frozen parameters (adapters fit one another although the vocabularies of their base models differ), and
    the factor of each LoRA layer. A quantised weight counts with the shape that it had before.
    """
    lines = [f"{name}: {_logical_shape(value)}" for name, value in model.named_parameters() if not value.requires_grad]
    for name, module in model.named_modules():
        factors = getattr(module, "scaling", None)  # PEFT: adapter name -> factor.
        if isinstance(factors, dict) and hasattr(module, "lora_A"):
            lines += [f"{name} LoRA factor of {adapter}: {float(factor)!r}" for adapter, factor in factors.items()]
    return lines


def check_layout(own: Sequence[str], expected: Sequence[str]) -> None:
    """Raises FederatedError naming the first frozen tensor in which this model is not that of the other clients."""
    if list(own) == list(expected):
        return
    mine, theirs = (dict(line.split(": ", 1) for line in lines) for lines in (own, expected))
    for name in dict.fromkeys([*theirs, *mine]):
        here, there = mine.get(name, "absent"), theirs.get(name, "absent")
        if here != there:
            raise FederatedError(
                f"This client's base model is not that of the other clients: {name} is {here} here, {there} there.",
                hint="Give all clients the same base model, vocabulary and LoRA settings.",
            )


@torch.no_grad()
def look_at(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The bits of some elements of each tensor, evenly spread: 64 to 127, all of a smaller one.

    They tell of writes through `.data`, as PEFT's merge makes them, of which torch counts no version. Nothing is read
    of a library's own kind of tensor.
    """
    values = {name: value.data for name, value in tensors.items() if not value.is_meta}
    plain = {name: value for name, value in values.items() if type(value) is torch.Tensor}
    looks = dict.fromkeys(tensors, b"")
    for device in {value.device for value in plain.values()}:
        parts = {name: _some_bits(value) for name, value in plain.items() if value.device == device}
        stream = io.BytesIO(torch.cat(list(parts.values())).cpu().numpy().tobytes())  # One copy from the device.
        looks |= {name: stream.read(len(part)) for name, part in parts.items()}
    return looks


def _some_bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // _NUM_LOOKED_AT)].contiguous().view(torch.uint8)


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
