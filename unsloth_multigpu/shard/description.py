"""What decides the memory of a training: its tensors by shape, and the sizes that its activations depend on. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from unsloth_multigpu.errors import SetupError

# As `str(torch.dtype)` without "torch.".
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
Packing = Literal["", "4bit", "4bit double", "8bit"]
Attention = Literal["sdpa", "flash", "eager"]
Checkpointing = Literal["off", "on", "offloaded"]
Loss = Literal["whole logits", "in chunks"]
# Weights in one constant of bitsandbytes' 4-bit types, and constants in one of those where they are quantised again.
_BLOCK, _OUTER_BLOCK = 64, 256
_CODE_BYTES, _OUTER_CODE_BYTES = 16 * 4, 256 * 4


@dataclass(frozen=True)
class Tensors:
    """Parameters or buffers of a model that are alike.

    Args:
        shape: Of the tensor before it is quantised.
        dtype: Name of its torch.dtype; of packed weights the one they are computed in.
        count: How many of them there are.
        trainable: The optimizer changes it.
        packing: How bitsandbytes stores it; "" = as it is.
        unit: What FSDP2 gathers it with: the name of a layer's class, "head", "embedding" or "rest"; "" = a buffer,
            which every rank has.
        embedding: It is the weight of an `nn.Embedding`, whose states bitsandbytes keeps in 32 bit.
        adapter: It belongs to an adapter of PEFT.
    """

    shape: tuple[int, ...]
    dtype: str
    count: int
    trainable: bool
    packing: Packing = ""
    unit: str = "rest"
    embedding: bool = False
    adapter: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise SetupError(
                f"A parameter has dtype {self.dtype!r}, and its memory cannot be forecast.",
                hint=f"Known are {', '.join(ITEM_BYTES)}. Decide without a forecast: shard='on' or 'off'.",
            )

    @property
    def numel(self) -> int:
        """Elements of one of them."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Of one element, where it is not packed."""
        return ITEM_BYTES[self.dtype]

    def weight_bytes(self) -> int:
        """Of one of them, with the constants of its packing."""
        return self.packed_bytes(self.numel) + self.constant_bytes()

    def packed_bytes(self, numel: int) -> int:
        """Of so many elements, without the constants."""
        if self.packing.startswith("4bit"):
            return (numel + 1) // 2
        return numel if self.packing == "8bit" else numel * self.item_bytes

    def constant_bytes(self) -> int:
        """What belongs to the packing of one of them and is on every rank."""
        if self.packing == "8bit":
            return 4 * self.shape[0]  # A constant in float32 for each row.
        if not self.packing:
            return 0
        blocks = -(-self.numel // _BLOCK)
        if self.packing == "4bit":
            return 4 * blocks + _CODE_BYTES
        # The constants in 8 bit, their own constants, the mean that was taken off, and both tables.
        return blocks + 4 * -(-blocks // _OUTER_BLOCK) + 4 + _CODE_BYTES + _OUTER_CODE_BYTES

    def part_numel(self, num_ranks: int) -> int:
        """Elements on the rank that has most: FSDP2 divides the first dimension, and does not divide a row."""
        if not self.shape:
            return 1
        if self.packing.startswith("4bit"):  # Packed into one column.
            return 2 * -(-((self.numel + 1) // 2) // num_ranks)
        return -(-self.shape[0] // num_ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Decoder:
    """Sizes of a dense decoder, of which its activations follow.

    Args:
        hidden: Features between layers.
        intermediate: Features inside of an MLP.
        num_layers: Layers.
        query: Features of all heads' queries.
        key: Features of all heads' keys; those of the values are as many.
        num_heads: Heads of the queries.
        vocabulary: Logits of a token.
        attention: What computes it.
        adapters: Adapted linear layers: (features in, features out, rank, count). None = no adapter.
        adapter_dtype: Of the adapters' weights.
        adapter_dropout: The adapters drop inputs.
        exact: False = the model's layers are not those that the formula is for.
    """

    hidden: int
    intermediate: int
    num_layers: int
    query: int
    key: int
    num_heads: int
    vocabulary: int
    attention: Attention = "sdpa"
    adapters: tuple[tuple[int, int, int, int], ...] = ()
    adapter_dtype: str = "float32"
    adapter_dropout: bool = False
    exact: bool = True


@dataclass(frozen=True)
class Training:
    """What the script's arguments say.

    Args:
        optimizer: `TrainingArguments.optim`.
        optimizer_arguments: `TrainingArguments.optim_args`, as name=value.
        autocast: dtype of mixed precision; "" = none.
        checkpointing: Gradient checkpointing; "offloaded" = layer inputs wait in the host's memory.
        rows: Samples of a micro-batch.
        tokens: Of its longest sample.
        accumulation: Micro-batches of a step of one process.
        padded: Samples of a micro-batch have different lengths.
        loss: How the loss comes from the hidden states.
        keeps_batch: Several ranks share the samples of one process's step; False = each takes as many.
        offload: Where the model is sharded, a rank's part lies in the host's memory.
        trains_parts: The optimizer can train a sharded model.
    """

    optimizer: str
    rows: int
    tokens: int
    optimizer_arguments: tuple[tuple[str, str], ...] = ()
    autocast: str = ""
    checkpointing: Checkpointing = "off"
    accumulation: int = 1
    padded: bool = False
    loss: Loss = "whole logits"
    keeps_batch: bool = True
    offload: bool = False
    trains_parts: bool = True

    def on_ranks(self, num_ranks: int) -> Training:
        """The same for one of so many ranks."""
        if not self.keeps_batch:
            return self
        samples = -(-self.rows * self.accumulation // num_ranks)
        rows = min(self.rows, samples)
        return replace(self, rows=rows, accumulation=-(-samples // rows))


@dataclass(frozen=True)
class Description:
    """All that a forecast is made from.

    Args:
        model: Name of the model's class, for messages.
        tensors: Its parameters and buffers; one that is shared, such as a tied embedding, once.
        decoder: What its activations follow from; None where that is not known.
        training: What the script's arguments say.
        units: How many groups of tensors FSDP2 gathers one after the other, by the name of the unit.
        notes: What was assumed, one sentence each.
    """

    model: str
    tensors: tuple[Tensors, ...]
    decoder: Decoder | None
    training: Training
    units: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    def parameters(self) -> Iterable[Tensors]:
        """Without the buffers."""
        return (t for t in self.tensors if t.unit)

    def trained(self) -> Iterable[Tensors]:
        """What the optimizer changes."""
        return (t for t in self.tensors if t.trainable)

    def plain_values(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Description:
        """The inverse of `plain_values`."""
        decoder, training = values["decoder"], dict(values["training"])
        training["optimizer_arguments"] = tuple((n, v) for n, v in training["optimizer_arguments"])
        if decoder is not None:
            decoder = Decoder(**{**decoder, "adapters": tuple(tuple(row) for row in decoder["adapters"])})
        return cls(
            model=values["model"],
            tensors=tuple(Tensors(**{**t, "shape": tuple(t["shape"])}) for t in values["tensors"]),
            decoder=decoder,
            training=Training(**training),
            units=tuple((name, count) for name, count in values["units"]),
            notes=tuple(values["notes"]),
        )
