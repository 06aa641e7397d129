"""Averages LoRA adapters: the mean of the clients' products B A differs from the product mean(B) mean(A).

A LoRA layer adds scaling * B A to its base weight. Flower's strategies average A and B separately (FedIT, Zhang et al.
2023, "Towards Building the Federated GPT"). This module computes the adapter of the same rank that is nearest to the
mean of the products (Eckart and Young 1936).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from flwr.app import Array, ArrayRecord

from unsloth_multigpu.errors import FederatedError

# Sent as float32: NumPy has no bfloat16, and the server would average float16 in half precision.
_HALF = (torch.bfloat16, torch.float16)
# Parts of PEFT's names: "<layer>.lora_A.<adapter>.weight", of an embedding "<layer>.lora_embedding_A.<adapter>".
_FACTORS = ((".lora_A.", ".lora_B."), (".lora_embedding_A.", ".lora_embedding_B."))
# Limit of the ratio of the largest to the smallest singular value of the new A, which otherwise is near the mean of the
# clients' A: a small A needs a large B. With 50, the next rounds learned worse than with 5
# (examples/experiments/federated_aggregation.py, learning rate 0.01).
_MAX_CONDITION = 5.0
# Limit of clients x rank up to which the remainder is computed. The time grows with the square: 160 take 0.02 s of one
# core for a layer of 4096 x 4096.
_MAX_COLUMNS = 256


def aggregate_lora(
    replies: Sequence[ArrayRecord], weights: Sequence[float], averaged: ArrayRecord, *, mode: str
) -> tuple[ArrayRecord, float | None]:
    """Returns the global arrays: those of `averaged`, the strategy's mean, with other A and B for mode="project".

    Also returns the remainder: their relative difference from mean(B A) over all LoRA layers, in the Frobenius norm.
    It is None without LoRA layers, or if computing it would take too long. Raises FederatedError if the weights, the
    clients' numbers of examples, sum to 0.
    """
    pairs, arrays = find_pairs(averaged), ArrayRecord(dict(averaged))
    if mode == "project":
        for name_a, name_b in pairs.items():
            factors = [(_double(reply, name_a), _double(reply, name_b)) for reply in replies]
            arrays[name_a], arrays[name_b] = map(_single, mean_of_products(factors, weights))
    return arrays, _remainder(pairs, replies, weights, arrays)


def mean_of_products(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], weights: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A and B of the clients' rank whose product is nearest to the weighted mean of B A, in float64.

    Never forms a matrix of shape (out, in): n clients need two QR factorizations of n * rank columns, and one SVD of at
    most that size. Of all A and B with this product, it takes those whose A is nearest to the mean of the clients' A,
    so that the learning rates of A and B keep their meaning from round to round.

    Args:
        pairs: (A, B) of each client, of shapes (rank, in) and (out, rank).
        weights: One per client, not negative. They need not sum to 1; FederatedError if they sum to 0.
    """
    fractions = _normalized(weights, len(pairs))
    of_a, of_b = ([factor.double() for factor in factors] for factors in zip(*pairs, strict=True))
    q_b, r_b = torch.linalg.qr(torch.cat([fraction * b for fraction, b in zip(fractions, of_b, strict=True)], 1))
    q_a, r_a = torch.linalg.qr(torch.cat(of_a).T)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    mean_a = torch.stack([fraction * a for fraction, a in zip(fractions, of_a, strict=True)]).sum(0)
    kept = min(len(mean_a), len(s))
    return _rescale(q_b @ u[:, :kept] * s[:kept], vh[:kept] @ q_a.T, mean_a)


def weighted_mean(replies: Sequence[ArrayRecord], weights: Sequence[float], names: Iterable[str]) -> ArrayRecord:
    """Returns the weighted means of these tensors, as float32. Raises FederatedError if the weights sum to 0."""
    fractions = _normalized(weights, len(replies))
    found = ArrayRecord()
    for name in names:
        values = [fraction * _double(reply, name) for fraction, reply in zip(fractions, replies, strict=True)]
        found[name] = _single(torch.stack(values).sum(0))
    return found


def find_pairs(names: Iterable[str]) -> dict[str, str]:
    """Returns the name of B by that of A for each pair in `names`. If one of them is frozen, the mean is exact."""
    known = dict.fromkeys(names)  # A set that keeps the order.
    return {name: b for name in known if (b := partner_of(name)) in known and name < b}


def partner_of(name: str) -> str:
    """Returns the name of B for that of A, and that of A for B; "" for other tensors."""
    for a, b in _FACTORS:
        if a in name or b in name:
            return name.replace(a, b) if a in name else name.replace(b, a)
    return ""


def _rescale(b: torch.Tensor, a: torch.Tensor, mean_a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A (rank, in) near `mean_a` and B (out, rank) whose product B A is that of b (out, kept) and a (kept, in).

    The rows of a are orthonormal. A = g a with g = mean_a a^T is nearest to `mean_a`, and B = b g^-1; the singular
    values of g are bounded below, so that it can be inverted.
    """
    u, s, vh = torch.linalg.svd(mean_a @ a.T, full_matrices=False)
    largest = float(s[0]) if len(s) and s[0] > 0 else 1.0
    s = s.clamp(min=largest / _MAX_CONDITION)
    return (u * s) @ vh @ a, (b @ vh.T / s) @ u.T


def _remainder(
    pairs: Mapping[str, str], replies: Sequence[ArrayRecord], weights: Sequence[float], arrays: ArrayRecord
) -> float | None:
    """Returns |B A - mean(B A)| / |mean(B A)| over all layers; None unless all factors are 2-D, or if too slow."""
    fractions = _normalized(weights, len(replies))
    ranks = [arrays[name].shape[0] for name in pairs if len(arrays[name].shape) == 2]
    if not pairs or len(ranks) < len(pairs) or max(ranks) * len(replies) > _MAX_COLUMNS:
        return None
    difference = total = 0.0
    for name_a, name_b in pairs.items():
        a = torch.cat([*(_double(reply, name_a) for reply in replies), _double(arrays, name_a)])
        of_clients = [fraction * _double(reply, name_b) for fraction, reply in zip(fractions, replies, strict=True)]
        b = torch.cat([*of_clients, -_double(arrays, name_b)], 1)
        # |B A|^2 is the sum over (B^T B) * (A A^T), small matrices. The part of the clients gives |mean(B A)|^2.
        squares, num_columns = b.T @ b * (a @ a.T), sum(b_of_one.shape[1] for b_of_one in of_clients)
        total += max(0.0, float(squares[:num_columns, :num_columns].sum()))  # Rounding may make it negative.
        difference += max(0.0, float(squares.sum()))
    return math.sqrt(difference / total) if total else 0.0


def _normalized(weights: Sequence[float], num_replies: int) -> list[float]:
    total = math.fsum(weights)
    if len(weights) != num_replies or min(weights, default=-1) < 0 or not 0 < total < math.inf:
        raise FederatedError(
            f"The clients' numbers of examples are {list(weights)[:8]}, so there is no weighted mean.",
            hint="train_fn must return the number of examples that it trained on, above 0 for at least one client.",
        )
    return [weight / total for weight in weights]


def to_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    # `Array` copies the values where `.cpu()` and `.numpy()` do not.
    return Array((tensor.float() if tensor.dtype in _HALF else tensor).numpy())


def to_tensor(array: Array) -> torch.Tensor:
    return torch.as_tensor(array.numpy())


def _double(arrays: ArrayRecord, name: str) -> torch.Tensor:
    return to_tensor(arrays[name]).double()


def _single(tensor: torch.Tensor) -> Array:
    return to_array(tensor.float())
