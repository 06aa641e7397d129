"""Bytes that forward and backward of a dense decoder keep, as torch's autograd saves them. Pure.

The formulas follow the layers of transformers' Llama line by line, which Mistral, Qwen and Phi share. They count what
autograd saves, so a base model under LoRA saves no inputs of frozen weights, and each adapter its own copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from unsloth_multigpu.shard.description import ITEM_BYTES, Decoder, Training

_FP32 = 4
# Rows of logits that a loss in chunks has at once.
_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank.

    Args:
        saved: From the forward to the backward of the whole model.
        loss: Of logits and their gradients, while the loss is computed.
        layer: While one layer goes backward: what it saves where it is computed anew, and its gradients.
    """

    saved: int
    loss: int
    layer: int


@dataclass(frozen=True)
class Weights:
    """What activations depend on in the base model.

    Args:
        item_bytes: Of one element of a linear layer's weight; of a packed one in what it is computed.
        trainable: Its linear layers and norms are trained.
        numel: Elements of the linear layers of one decoder layer.
        head_numel: Elements of the language head.
        packed: They are unpacked for each use.
    """

    item_bytes: int
    trainable: bool
    numel: int
    head_numel: int
    packed: bool = False


def activations(decoder: Decoder, training: Training, weights: Weights) -> Activations:
    """Bytes of one micro-batch.

    Args:
        decoder: Sizes of the model.
        training: Rows, tokens, precision and checkpointing.
        weights: Of the base model.
    """
    tokens = training.rows * training.tokens
    stream = weights.item_bytes  # Of what goes from layer to layer: bf16, or fp32 also under autocast.
    compute = ITEM_BYTES[training.autocast] if training.autocast else stream
    layer = layer_bytes(decoder, training, weights)
    # The inner gradients of an MLP and of the residual are there while the layer's own tensors are.
    backward = tokens * (2 * decoder.intermediate * compute + decoder.hidden * stream)
    if decoder.adapters and ITEM_BYTES[decoder.adapter_dtype] != compute:
        backward += tokens * decoder.intermediate * ITEM_BYTES[decoder.adapter_dtype]
    unpacked = 0
    if weights.packed:
        unpacked = compute * max(decoder.hidden * decoder.intermediate, decoder.hidden * decoder.query)
    angles = 2 * training.tokens * (decoder.query // decoder.num_heads) * stream
    head = _norm_bytes(decoder, weights, tokens, is_cast=compute != stream)
    # A cast of the head's weight is saved for the backward.
    if training.autocast and stream != compute:
        head += compute * weights.head_numel
        if weights.trainable:
            head += tokens * compute * decoder.hidden  # The norm's output, cast for the head.
    if training.checkpointing == "off":
        saved, working = decoder.num_layers * layer, backward
    else:
        inputs = tokens * decoder.hidden * stream * decoder.num_layers
        saved, working = (inputs if training.checkpointing == "on" else 0), layer + backward
        if training.autocast and weights.trainable and stream != compute:
            # Autocast keeps the casts of trainable weights until the forward has ended.
            working = max(working, decoder.num_layers * weights.numel * compute)
    return Activations(saved + head + angles, _loss_bytes(decoder, training), working + unpacked)


def layer_bytes(decoder: Decoder, training: Training, weights: Weights) -> int:
    """What autograd saves of one decoder layer and one micro-batch."""
    tokens = training.rows * training.tokens
    stream = weights.item_bytes
    compute = ITEM_BYTES[training.autocast] if training.autocast else stream
    hidden, inner = decoder.hidden, decoder.intermediate
    casts = compute != stream  # Weights in fp32 under autocast: each linear layer has a cast of its input.
    saved = 2 * _norm_bytes(decoder, weights, tokens, is_cast=casts)
    if casts:
        # Queries, keys and values; gate and up. Without a cast they share the norm's output.
        saved += tokens * compute * (5 * hidden if weights.trainable else 0)
    saved += _attention_bytes(decoder, training, compute)
    # The gate, what the activation function makes of it, and up; their product is the last linear layer's input.
    saved += tokens * compute * inner * (4 if weights.trainable else 3)
    if decoder.adapters:
        saved += _adapter_bytes(decoder, training, weights, compute)
    if casts and not weights.packed:
        saved += compute * weights.numel  # Their casts, through which the gradient of the inputs goes.
    return saved


def _norm_bytes(decoder: Decoder, weights: Weights, tokens: int, *, is_cast: bool) -> int:
    """Of one RMSNorm: its input in fp32 and a number for each token; normalised and output where weights need them.

    Args:
        decoder: Sizes of the model.
        weights: Of the base model.
        tokens: Of the micro-batch.
        is_cast: The output is saved as its casts, which are counted elsewhere.
    """
    kept = (1 if is_cast else 2) * decoder.hidden * weights.item_bytes if weights.trainable else 0
    return tokens * (_FP32 * decoder.hidden + _FP32 + kept)


def _attention_bytes(decoder: Decoder, training: Training, compute: int) -> int:
    """Queries, keys, values and the output; with a mask also what a kernel makes of it."""
    tokens, length = training.rows * training.tokens, training.tokens
    query, key, heads = decoder.query, decoder.key, decoder.num_heads
    square = training.rows * length * length
    if decoder.attention == "eager":
        # Keys and values are repeated for all heads; probabilities in fp32 and as they are multiplied.
        scores = heads * square * (_FP32 + (compute if compute != _FP32 else 0))
        return tokens * compute * 4 * query + scores
    is_masked = decoder.attention == "sdpa" and training.padded
    keys = query if is_masked else key
    statistics = tokens * heads * _FP32
    return tokens * compute * (2 * query + 2 * keys) + statistics + (square * compute if is_masked else 0)


def _adapter_bytes(decoder: Decoder, training: Training, weights: Weights, compute: int) -> int:
    """Inputs and low-rank outputs of a layer's adapters, which compute in their own dtype."""
    tokens = training.rows * training.tokens
    own = ITEM_BYTES[training.autocast] if training.autocast else ITEM_BYTES[decoder.adapter_dtype]
    layers = decoder.num_layers
    ranks = sum(rank * count for _, _, rank, count in decoder.adapters) / layers
    features = sum(into * count for into, _, _, count in decoder.adapters) / layers
    saved = tokens * own * ranks
    is_cast = ITEM_BYTES[decoder.adapter_dtype] != compute or own != weights.item_bytes or training.autocast != ""
    if is_cast or decoder.adapter_dropout:
        saved += tokens * own * features  # A copy for each adapter.
    else:
        # Queries, keys and values share one input, gate and up another; the output of attention is saved anyway.
        saved += tokens * own * (2 * decoder.hidden + decoder.intermediate)
    if decoder.adapter_dropout:
        # The mask of what was dropped is kept as it is multiplied.
        saved += tokens * features * own
    if training.autocast and own != ITEM_BYTES[decoder.adapter_dtype]:
        saved += own * sum((into + out) * rank * count for into, out, rank, count in decoder.adapters) / layers
    return round(saved)


def _loss_bytes(decoder: Decoder, training: Training) -> int:
    """Log-probabilities and two gradients in fp32, whatever the model computes in."""
    tokens = training.rows * training.tokens
    if training.loss == "in chunks":
        tokens = min(tokens, _CHUNK_TOKENS)
    return tokens * decoder.vocabulary * 3 * _FP32
