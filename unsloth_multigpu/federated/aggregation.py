"""The mean of LoRA products: the mean of the clients' weights is mean(B A), which differs from mean(B) mean(A).

A LoRA layer adds factor * B A to its base weight. Flower's strategies average A and B separately (FedIT, Zhang et al.
2023, "Towards Building the Federated GPT"). This module computes the adapter of the same rank that is nearest to the
mean of the products (Eckart and Young 1936).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from flwr.app import Array, ArrayRecord

from unsloth_multigpu.errors import FederatedError

# NumPy has no bfloat16, and the server would average in half precision.
_HALF = (torch.bfloat16, torch.float16)
# In PEFT's names: "<layer>.lora_A.<adapter>.weight", of an embedding "<layer>.lora_embedding_A.<adapter>".
_FACTORS = ((".lora_A.", ".lora_B."), (".lora_embedding_A.", ".lora_embedding_B."))
# A keeps the scale of the clients' A, but its singular values are at least a fifth of the largest. With 50 in place of
# 5, the next rounds learned worse (examples/experiments/federated_aggregation.py, learning rate 0.01): a small A needs
# a large B.
_MAX_CONDITION = 5.0
# Limit of clients x rank up to which the difference is measured. The time grows with the square: 160 take 0.02 s of one
# core for a layer of 4096 x 4096.
_MAX_COLUMNS = 256


def aggregate_lora(
    replies: Sequence[ArrayRecord], weights: Sequence[float], averaged: ArrayRecord, *, mode: str
) -> tuple[ArrayRecord, float | None]:
    """Replaces A and B in `averaged`, the strategy's result over all tensors, for mode="project".

    Returns the global state, and its relative difference from mean(B A) over all layers, in the Frobenius norm; None
    without LoRA layers, and if computing it would take too long.

    Raises FederatedError if the weights, the numbers of examples, sum to 0.
    """
    pairs, arrays = find_pairs(averaged), ArrayRecord(dict(averaged))
    if mode == "project":
        for name_a, name_b in pairs.items():
            factors = [(_double(reply, name_a), _double(reply, name_b)) for reply in replies]
            arrays[name_a], arrays[name_b] = map(_single, mean_of_products(factors, weights))
    return arrays, _difference(pairs, replies, weights, arrays)


def mean_of_products(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], weights: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A and B of the clients' rank whose product is nearest to the weighted mean of B A, in float64.

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
    of_a, of_b = ([factor.double() for factor in factors] for factors in zip(*pairs, strict=True))
    basis_b, inner_b = torch.linalg.qr(torch.cat([part * b for part, b in zip(parts, of_b, strict=True)], 1))
    basis_a, inner_a = torch.linalg.qr(torch.cat(of_a).T)
    left, values, right = torch.linalg.svd(inner_b @ inner_a.T, full_matrices=False)
    mean_a = torch.stack([part * a for part, a in zip(parts, of_a, strict=True)]).sum(0)
    kept = min(len(mean_a), len(values))
    return _rescale(basis_b @ left[:, :kept] * values[:kept], right[:kept] @ basis_a.T, mean_a)


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
    return {name: b for name in known if (b := partner_of(name)) in known and name < b}


def partner_of(name: str) -> str:
    """Returns the name of B for that of A, and the reverse; "" for other tensors."""
    for a, b in _FACTORS:
        if a in name or b in name:
            return name.replace(a, b) if a in name else name.replace(b, a)
    return ""


def _rescale(b: torch.Tensor, a: torch.Tensor, mean_a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A (rank, in) near `mean_a` and B (out, rank) with the product of b (out, kept) and a (kept, in).

    a has orthonormal rows. A = g a with g = mean_a a^T, the nearest one, whose singular values are bounded below so
    that it can be inverted.
    """
    turn, stretch, back = torch.linalg.svd(mean_a @ a.T, full_matrices=False)
    largest = float(stretch[0]) if len(stretch) and stretch[0] > 0 else 1.0
    stretch = stretch.clamp(min=largest / _MAX_CONDITION)
    return (turn * stretch) @ back @ a, (b @ back.T / stretch) @ turn.T


def _difference(
    pairs: Mapping[str, str], replies: Sequence[ArrayRecord], weights: Sequence[float], arrays: ArrayRecord
) -> float | None:
    """Returns |B A - mean(B A)| / |mean(B A)| over all layers; None without 2-D factors or if too slow."""
    parts = _normalized(weights, len(replies))
    ranks = [arrays[name].shape[0] for name in pairs if len(arrays[name].shape) == 2]
    if not pairs or len(ranks) < len(pairs) or max(ranks) * len(replies) > _MAX_COLUMNS:
        return None
    difference = total = 0.0
    for name_a, name_b in pairs.items():
        a = torch.cat([*(_double(reply, name_a) for reply in replies), _double(arrays, name_a)])
        own = [part * _double(reply, name_b) for part, reply in zip(parts, replies, strict=True)]
        b = torch.cat([*own, -_double(arrays, name_b)], 1)
        # |B A|^2 is the sum of (B^T B) * (A A^T), which are small. Without the rows of `arrays` it is the total.
        squares, own_rank = b.T @ b * (a @ a.T), sum(part.shape[1] for part in own)
        total += max(0.0, float(squares[:own_rank, :own_rank].sum()))  # Rounding may make it negative.
        difference += max(0.0, float(squares.sum()))
    return math.sqrt(difference / total) if total else 0.0


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
