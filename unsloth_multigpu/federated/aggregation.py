"""The mean of LoRA products: the mean of the clients' weights is mean(B A), which differs from mean(B) mean(A).

A LoRA layer adds factor * B A to its base weight. Flower's strategies average A and B separately (FedIT, Zhang et al.
2023, "Towards Building the Federated GPT"). This module computes the adapter of the same rank that is nearest to the
mean of the products (Eckart and Young 1936).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from flwr.app import Array, ArrayRecord

from unsloth_multigpu.errors import FederatedError

# NumPy has no bfloat16, and the server would average in half precision.
_HALF = (torch.bfloat16, torch.float16)
# PEFT's names: "<layer>.lora_A.<adapter>.weight", of an embedding "<layer>.lora_embedding_A.<adapter>".
_FACTOR = re.compile(
    r"(?P<layer>.+\.lora_(?P<table>embedding_)?)(?P<side>[AB])(?P<adapter>\.[^.]+)(?P<weight>\.weight)?"
)
_PLAIN = re.compile(r".+\.lora_B\.[^.]+\.bias")
# A keeps the scale of the clients' A, but its singular values are at least a fifth of the largest. With 50 in place of
# 5, the next rounds learned worse (examples/experiments/federated_aggregation.py, learning rate 0.01): a small A needs
# a large B.
_MAX_CONDITION = 5.0
# Limit of clients x rank up to which "mean" measures its difference. The time grows with the square: 160 take 0.02 s of
# one core for a layer of 4096 x 4096.
_MAX_COLUMNS = 256


class Split(NamedTuple):
    """The product b @ a that is nearest to the mean of products. Shapes (rank, in), (out, rank).

    `remainder_square` and `total_square` are squared Frobenius norms: of the difference from the mean, and of the mean.
    """

    a: torch.Tensor
    b: torch.Tensor
    remainder_square: float
    total_square: float


def aggregate_lora(
    replies: Sequence[ArrayRecord], weights: Sequence[float], averaged: ArrayRecord, *, mode: str
) -> tuple[ArrayRecord, float | None]:
    """Replaces A and B in `averaged`, the strategy's result over all tensors, from the clients' replies.

    "mean" keeps that result and measures its difference. "project" requires that `not_projectable` has no objection.

    Returns the global state, and its relative difference from mean(B A) over all layers, in the Frobenius norm; None
    without LoRA layers, and if computing it for "mean" would take too long.

    Raises FederatedError if the weights, the numbers of examples, sum to 0.
    """
    pairs = find_pairs(averaged)
    if mode == "mean":
        return averaged, _difference_of_means(pairs, replies, weights, averaged)
    arrays, squares = ArrayRecord(dict(averaged)), [0.0, 0.0]
    for name_a, name_b in pairs.items():
        factors = [(_double(reply, name_a), _double(reply, name_b)) for reply in replies]
        split = mean_of_products(factors, weights)
        arrays[name_a], arrays[name_b] = _single(split.a), _single(split.b)
        squares = [squares[0] + split.remainder_square, squares[1] + split.total_square]
    return arrays, _ratio(*squares)


def mean_of_products(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], weights: Sequence[float]) -> Split:
    """Returns the product of the clients' rank that is nearest to the weighted mean of B A. Computes in float64.

    Never forms a matrix of (out, in): with n clients it needs two QR factorizations of (n rank) columns, and one SVD of
    at most that size. Of all A with the same product, it takes the one nearest to the mean of the clients' A, so that
    the learning rates of A and B keep their meaning from round to round.

    Args:
        pairs: (A, B) of each client, of shapes (rank, in) and (out, rank).
        weights: One per client, not negative; need not sum to 1, but not to 0.

    Raises:
        FederatedError: The weights sum to 0.
    """
    parts = _normalized(weights, len(pairs))
    pairs = [(a.double(), b.double()) for a, b in pairs]
    left, values, right = _svd_of_product(
        torch.cat([part * b for part, (_, b) in zip(parts, pairs, strict=True)], 1), torch.cat([a for a, _ in pairs])
    )
    mean_a = torch.stack([part * a for part, (a, _) in zip(parts, pairs, strict=True)]).sum(0)
    kept = min(len(mean_a), len(values))
    a, b = _rescale(left[:, :kept] * values[:kept], right[:kept], mean_a)
    return Split(a, b, float(values[kept:].square().sum()), float(values.square().sum()))


def weighted_mean(replies: Sequence[ArrayRecord], weights: Sequence[float], names: Iterable[str]) -> ArrayRecord:
    """Returns the weighted mean of buffers, to which a server's optimizer must not be applied. Sums in float64."""
    parts = _normalized(weights, len(replies))
    found = ArrayRecord()
    for name in names:
        values = [part * _double(reply, name) for part, reply in zip(parts, replies, strict=True)]
        found[name] = _single(torch.stack(values).sum(0))
    return found


def find_pairs(names: Iterable[str]) -> dict[str, str]:
    """Returns the name of B for each A if both are exchanged. With one of them frozen the plain mean is exact."""
    known = dict.fromkeys(names)  # In the names' order.
    pairs = {name: partner_of(name) for name in known}
    return {name: b for name in known if (b := pairs[name]) in known and b is not None and name < b}


def partner_of(name: str) -> str | None:
    """Returns the name of B for that of A, and the reverse; None for other tensors."""
    match = _FACTOR.fullmatch(name)
    if match is None:
        return None
    return f"{match['layer']}{'B' if match['side'] == 'A' else 'A'}{match['adapter']}{match['weight'] or ''}"


def not_projectable(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns reasons why "project" cannot work with exchanged tensors of these names and shapes; empty = it can."""
    reasons = [] if find_pairs(shapes) else ["no pair of lora_A and lora_B is trained"]
    for name, shape in shapes.items():
        if "lora_" not in name or _PLAIN.fullmatch(name):
            continue
        match = _FACTOR.fullmatch(name)
        if match is None or bool(match["table"]) == bool(match["weight"]):
            reasons.append(f"{name} is not a factor of a plain LoRA product (DoRA and AdaLoRA have such tensors)")
        elif len(shape) != 2:
            reasons.append(f"{name} has shape {shape}: the product of a convolution's factors is not a matrix")
    return reasons


def _svd_of_product(b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SVD of (out, k) @ (k, in): left (out, m), descending values (m,), right (m, in), with m <= min(k, out, in)."""
    basis_b, inner_b = torch.linalg.qr(b)
    basis_a, inner_a = torch.linalg.qr(a.T)
    left, values, right = torch.linalg.svd(inner_b @ inner_a.T, full_matrices=False)
    return basis_b @ left, values, right @ basis_a.T


def _rescale(b: torch.Tensor, a: torch.Tensor, mean_a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A (rank, in) near `mean_a` and B (out, rank) with the product of b (out, kept) and a (kept, in).

    a has orthonormal rows. A = g a with g = mean_a a^T, the nearest one, whose singular values are bounded below so
    that it can be inverted.
    """
    turn, stretch, back = torch.linalg.svd(mean_a @ a.T, full_matrices=False)
    largest = float(stretch[0]) if len(stretch) and stretch[0] > 0 else 1.0
    stretch = stretch.clamp(min=largest / _MAX_CONDITION)
    return (turn * stretch) @ back @ a, (b @ back.T / stretch) @ turn.T


def _difference_of_means(
    pairs: Mapping[str, str], replies: Sequence[ArrayRecord], weights: Sequence[float], averaged: ArrayRecord
) -> float | None:
    """Returns |mean(B) mean(A) - mean(B A)| / |mean(B A)| over all layers; None without 2-D factors or if too slow."""
    parts = _normalized(weights, len(replies))
    ranks = [averaged[name].shape[0] for name in pairs if len(averaged[name].shape) == 2]
    if not pairs or len(ranks) < len(pairs) or max(ranks) * len(replies) > _MAX_COLUMNS:
        return None
    difference = total = 0.0
    for name_a, name_b in pairs.items():
        a = torch.cat([*(_double(reply, name_a) for reply in replies), _double(averaged, name_a)])
        own = [part * _double(reply, name_b) for part, reply in zip(parts, replies, strict=True)]
        b = torch.cat([*own, -_double(averaged, name_b)], 1)
        # |B A|^2 is the sum of (B^T B) * (A A^T), which are small. Without the rows of the mean it is the total.
        squares, own_rank = b.T @ b * (a @ a.T), sum(part.shape[1] for part in own)
        total += max(0.0, float(squares[:own_rank, :own_rank].sum()))  # Rounding may make it negative.
        difference += max(0.0, float(squares.sum()))
    return _ratio(difference, total)


def _ratio(part_square: float, total_square: float) -> float:
    return math.sqrt(part_square / total_square) if total_square else 0.0


def _normalized(weights: Sequence[float], num_replies: int) -> list[float]:
    total = math.fsum(weights)
    if len(weights) != num_replies or min(weights, default=-1) < 0 or not 0 < total < math.inf:
        raise FederatedError(
            f"The clients' numbers of examples are {list(weights)[:8]}, so there is no weighted mean.",
            hint="train_fn must return the number of trained examples, above 0 for at least one client.",
        )
    return [weight / total for weight in weights]


def to_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    # Array copies the values, also if `.cpu()` does not.
    return Array((tensor.float() if tensor.dtype in _HALF else tensor).numpy())


def to_tensor(array: Array) -> torch.Tensor:
    return torch.as_tensor(array.numpy())


def _double(arrays: ArrayRecord, name: str) -> torch.Tensor:
    return to_tensor(arrays[name]).double()


def _single(tensor: torch.Tensor) -> Array:
    return to_array(tensor.float())
