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
        part: Of the gradients, on the rank that has most.
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
    units = dict(description.units)
    layers = [name for name in units if name not in OUTER]
    groups = {name: _group(description, training, name, num_ranks) for name in units}
    none = _Group()
    # The largest layer stands for all; their parts add up.
    layer = max((groups[name] for name in layers), key=lambda group: group.weights + group.gradients, default=none)
    all_layers = sum(groups[name].part * units[name] for name in layers)
    head, embedding = groups.get("head", none) + groups.get("rest", none), groups.get("embedding", none)
    # One group, which is gathered first and freed last.
    is_tied = any(t.unit == "head" and t.embedding for t in description.tensors)
    first, twice = (head, 1) if is_tied else (embedding, 2)
    stays = head.weights + head.gradients if is_tied else 0
    # While a step has several micro-batches, their gradients add up whole, and are divided in the last one.
    held = _whole_gradients(description, training)
    parts = 0 if training.offload else 1
    of_head, of_layers = parts * head.part, parts * all_layers
    everything = of_head + of_layers + parts * embedding.part
    item_bytes = ITEM_BYTES[training.autocast] if training.autocast else _stream_bytes(description)
    num_logits = kept.loss // _LOSS_BACKWARD
    forward = num_logits * (_LOSS_FORWARD + (item_bytes if item_bytes != _FP32 else 0))
    passing = 2 * layer.weights + layer.gradients
    sent_first, divided = (0, 0) if is_tied else (head.sent, of_head)
    last = parts * (all_layers // max(sum(units[name] for name in layers), 1))
    moments = [
        # What was received is freed when the next group arrives, or the forward pass has ended.
        Moment(2 * first.weights, held, 0),
        Moment(twice * head.weights + layer.weights, held, kept.saved),
        Moment(twice * head.weights, held, kept.saved + forward),
        Moment(head.weights, held, kept.saved + kept.loss),
        # A group's gradients are copied to be sent; meanwhile the next one is gathered.
        Moment(
            head.gradients + max(head.weights, head.sent) + 2 * layer.weights,
            held,
            kept.saved + num_logits * item_bytes,
        ),
        # The head's are still being sent, or those of the layer behind.
        Moment(
            passing + stays + sent_first,
            divided + max(0, held - sent_first),
            kept.saved + kept.layer,
        ),
        Moment(
            layer.weights + max(layer.weights, embedding.weights) + layer.gradients + layer.sent + stays,
            everything - parts * embedding.part - last,
            kept.layer,
        ),
        Moment(0, everything, update_bytes),
    ]
    if first.gradients:
        whole = 3 * first.gradients + first.weights + layer.sent if is_tied else first.gradients + first.sent
        moments.append(Moment(whole, of_layers if is_tied else everything, 0))
    return max(moments, key=lambda moment: moment.total)


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
        part=sum(t.count * t.numel * t.item_bytes for t in parts) // num,
    )


def _gathered_size(tensors: Tensors, training: Training) -> int:
    if tensors.packing:
        return 0 if tensors.packing == "8bit" else tensors.packed_bytes(tensors.numel)
    item_bytes = min(tensors.item_bytes, ITEM_BYTES[training.autocast]) if training.autocast else tensors.item_bytes
    return tensors.numel * item_bytes
