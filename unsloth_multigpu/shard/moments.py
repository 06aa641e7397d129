"""Where in a step a sharded training needs most. Pure.

FSDP2 gathers groups of weights one after the other and frees them again, and so with their gradients: what is on a rank
at once differs from moment to moment. The moments follow torch's `fully_shard` (2.13), and accelerate's groups: each
layer, the embedding, and the last norm with the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unsloth_multigpu.shard.activation import Activations
from unsloth_multigpu.shard.description import ITEM_BYTES, Description, Tensors, Training

# Units that are no layers.
OUTER = ("head", "embedding", "rest")
# Bytes of a logit in the loss's forward pass beside the logit itself: in fp32, and its log-probability.
_LOSS_FORWARD, _LOSS_BACKWARD, _FP32 = 8, 12, 4


@dataclass(frozen=True)
class Moment:
    """Bytes on a rank at one moment, beside its parts of the weights and the optimizer's states.

    Args:
        gathered: Whole weights, and whole gradients until they are divided.
        gradients: Parts of gradients, and those that add up whole over several micro-batches.
        activations: What autograd keeps, or what the update needs.
    """

    gathered: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.gathered + self.gradients + self.activations


@dataclass(frozen=True)
class _Group:
    """Bytes of a group of weights that is gathered at once.

    Args:
        weights: Whole, in the dtype in which they are computed.
        gradients: Whole, of what is trained, in the same dtype.
        sent: The same in the dtype in which ranks add them up.
        part: Of the gradients, on the device that has most.
    """

    weights: int = 0
    gradients: int = 0
    sent: int = 0
    part: int = 0

    def __add__(self, other: _Group) -> _Group:
        return _Group(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.sent + other.sent,
            self.part + other.part,
        )


@dataclass(frozen=True)
class _Groups:
    """The groups of a model.

    Args:
        layer: The largest, which stands for all.
        head: With the last norm.
        embedding: Empty where it is the head's weight (tied).
        num_layers: Their number.
        of_layers: Parts of the gradients of all layers.
        is_tied: One group, which is gathered first and freed last.
    """

    layer: _Group
    head: _Group
    embedding: _Group
    num_layers: int
    of_layers: int
    is_tied: bool

    @property
    def parts(self) -> int:
        """Of the gradients of all groups."""
        return self.of_layers + self.head.part + self.embedding.part


def largest_moment(
    description: Description, training: Training, kept: Activations, num_ranks: int, update_bytes: int
) -> Moment:
    """The moment of a step at which a rank needs most.

    Args:
        description: Of the model.
        training: Of one rank.
        kept: Activations of a micro-batch.
        num_ranks: Among which the weights are divided.
        update_bytes: What the optimizer needs on the device while it updates.
    """
    groups = _groups(description, training, num_ranks)
    # While a step has several micro-batches, their gradients add up whole, and are divided in the last one.
    held = _whole_gradients(description, training)
    item_bytes = ITEM_BYTES[training.autocast] if training.autocast else _stream_bytes(description)
    moments = [
        *_forward(groups, kept, held, item_bytes),
        *_backward(groups, kept, held, item_bytes),
        Moment(0, groups.parts, update_bytes),
    ]
    return max(moments, key=lambda moment: moment.total)


def _forward(groups: _Groups, kept: Activations, held: int, item_bytes: int) -> list[Moment]:
    """Up to the loss. `held`: whole gradients of earlier micro-batches. `item_bytes`: of a logit."""
    layer, head = groups.layer, groups.head
    first, num_copies = (head, 1) if groups.is_tied else (groups.embedding, 2)
    of_a_logit = _LOSS_FORWARD + (item_bytes if item_bytes != _FP32 else 0)
    return [
        # What was received is freed when the next group arrives, or the forward pass has ended.
        Moment(2 * first.weights, held, 0),
        Moment(num_copies * head.weights + layer.weights, held, kept.saved),
        Moment(num_copies * head.weights, held, kept.saved + _num_logits(kept) * of_a_logit),
    ]


def _backward(groups: _Groups, kept: Activations, held: int, item_bytes: int) -> list[Moment]:
    """From the loss down to the embedding. The arguments are those of `_forward`."""
    layer, head, embedding = groups.layer, groups.head, groups.embedding
    # A tied weight stays whole with its gradient until the embedding is done; else the head's are sent at once.
    stays = head.weights + head.gradients if groups.is_tied else 0
    sent, divided = (0, 0) if groups.is_tied else (head.sent, head.part)
    before_last = groups.parts - embedding.part - groups.of_layers // max(groups.num_layers, 1)
    moments = [
        Moment(head.weights, held, kept.saved + kept.loss),
        # A group's gradients are copied to be sent; meanwhile the next one is gathered.
        Moment(
            head.gradients + max(head.weights, head.sent) + 2 * layer.weights,
            held,
            kept.saved + _num_logits(kept) * item_bytes,
        ),
        # The head's are still being sent, or those of the layer behind.
        Moment(
            2 * layer.weights + layer.gradients + stays + sent,
            divided + max(0, held - sent),
            kept.saved + kept.layer,
        ),
        # The first layer's gradients are being sent, and the embedding is gathered.
        Moment(
            layer.weights + max(layer.weights, embedding.weights) + layer.gradients + layer.sent + stays,
            before_last,
            kept.layer,
        ),
    ]
    if groups.is_tied and head.gradients:
        # Those of the head and of the embedding are added up to a third.
        moments.append(Moment(3 * head.gradients + head.weights + layer.sent, groups.of_layers, 0))
    elif embedding.gradients:
        moments.append(Moment(embedding.gradients + embedding.sent, groups.parts, 0))
    return moments


def _num_logits(kept: Activations) -> int:
    return kept.loss // _LOSS_BACKWARD


def _groups(description: Description, training: Training, num_ranks: int) -> _Groups:
    units, none = dict(description.units), _Group()
    groups = {name: _group(description, training, name, num_ranks) for name in units}
    layers = [name for name in units if name not in OUTER]
    return _Groups(
        layer=max((groups[name] for name in layers), key=lambda group: group.weights + group.gradients, default=none),
        head=groups.get("head", none) + groups.get("rest", none),
        embedding=groups.get("embedding", none),
        num_layers=sum(units[name] for name in layers),
        of_layers=sum(groups[name].part * units[name] for name in layers),
        is_tied=any(t.unit == "head" and t.embedding for t in description.tensors),
    )


def _whole_gradients(description: Description, training: Training) -> int:
    """Bytes of gradients that add up whole between the micro-batches of a step."""
    if training.accumulation == 1:
        return 0
    return sum(t.count * t.numel * max(t.item_bytes, part_bytes(t, training)) for t in description.trained())


def part_of(tensors: Tensors, training: Training, num_ranks: int) -> Tensors:
    """What one rank has of them; accelerate trains in fp32 where mixed precision is on."""
    shape = tensors.shape
    shape = (-(-shape[0] // num_ranks), *shape[1:]) if shape else shape
    return replace(tensors, shape=shape, dtype="float32" if _is_cast(tensors, training) else tensors.dtype)


def part_bytes(tensors: Tensors, training: Training) -> int:
    """Of one element of a rank's part."""
    return ITEM_BYTES["float32"] if _is_cast(tensors, training) else tensors.item_bytes


def _is_cast(tensors: Tensors, training: Training) -> bool:
    return bool(training.autocast) and tensors.trainable


def _stream_bytes(description: Description) -> int:
    """Of an element of the logits, which are computed in the dtype of the embedding."""
    embeddings = [t for t in description.parameters() if t.embedding] or list(description.parameters())
    return embeddings[0].item_bytes


def _group(description: Description, training: Training, name: str, num_ranks: int) -> _Group:
    """One group of this name: several of a name are alike."""
    found = [t for t in description.tensors if t.unit == name]
    trained = [t for t in found if t.trainable]
    num = dict(description.units)[name]
    parts = [part_of(t, training, num_ranks) for t in trained]
    return _Group(
        weights=sum(t.count * _gathered_size(t, training) for t in found) // num,
        gradients=sum(t.count * _gathered_size(t, training) for t in trained) // num,
        sent=sum(t.count * t.numel * part_bytes(t, training) for t in trained) // num,
        # Offloaded parts lie in the host's memory.
        part=0 if training.offload else sum(t.count * t.numel * t.item_bytes for t in parts) // num,
    )


def _gathered_size(tensors: Tensors, training: Training) -> int:
    if tensors.packing:
        return 0 if tensors.packing == "8bit" else tensors.packed_bytes(tensors.numel)
    item_bytes = min(tensors.item_bytes, ITEM_BYTES[training.autocast]) if training.autocast else tensors.item_bytes
    return tensors.numel * item_bytes
