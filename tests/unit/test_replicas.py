"""The hash of the replica proof sees every bit, and the message names ranks and tensors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from unsloth_multigpu.errors import DivergenceError
from unsloth_multigpu.options import MultiGPUConfig


def hash_of(tensor: Any) -> int:
    from unsloth_multigpu.group.replicas import tensor_hashes

    return tensor_hashes([tensor])[0]


def bits(tensor: Any) -> Any:
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unsloth_multigpu.group.replicas._CPU_CHUNK", 4)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_every_single_bit_changes_the_hash(small_chunks: None, name: str) -> None:
    import torch

    tensor = torch.randn(11, generator=torch.Generator().manual_seed(0)).to(getattr(torch, name))
    hashes = {hash_of(tensor)}
    num_bits = 8 * tensor.element_size()
    for place in range(len(tensor)):
        for bit in range(num_bits):
            changed = tensor.clone()
            bits(changed)[place] ^= -(2**bit) if bit == num_bits - 1 else 2**bit
            hashes.add(hash_of(changed))
    assert len(hashes) == 1 + len(tensor) * num_bits


def test_hash_knows_the_place_also_between_chunks(small_chunks: None) -> None:
    import torch

    hashes = {hash_of(torch.eye(40)[i]) for i in range(40)}
    assert len(hashes) == 40


def test_empty_scalar_and_complex_tensors_have_a_hash() -> None:
    import torch

    assert hash_of(torch.zeros(0)) == hash_of(torch.zeros(0, 3).t()) == 0
    assert hash_of(torch.tensor(1.0)) != hash_of(torch.tensor(2.0))
    assert hash_of(torch.tensor([1 + 2j])) != hash_of(torch.tensor([1 - 2j]))


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ([[1, 1], [1, 2]], "rank 0 and rank 1 differ in 1 of 2 trainable tensors: b"),
        ([[9, 1], [1, 1], [1, 1]], "rank 0 differs from the other ranks in 1 of 2 trainable tensors: a"),
        (
            [[1, 1], [2, 1], [1, 3]],
            "rank 1 differs from the other ranks in 1 of 2 trainable tensors: a; "
            "rank 2 differs from the other ranks in 1 of 2 trainable tensors: b",
        ),
        ([[1, 1], [2, 1], [3, 1]], "rank 0 and rank 1 and rank 2 differ in 1 of 2 trainable tensors: a"),
        (
            [[1, 1], [1, 1], [1, 1], [2, 1], [3, 1]],
            "ranks 3, 4 differ from the other ranks in 1 of 2 trainable tensors: a",
        ),
    ],
)
def test_message_names_the_minority(hashes: list[list[int]], message: str) -> None:
    from unsloth_multigpu.group.replicas import describe_divergence

    assert describe_divergence(["a", "b"], hashes) == message


class Group:
    """Ranks as threads, which meet in every exchange."""

    def __init__(self, num_ranks: int) -> None:
        self.said: list[Any] = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.said[rank] = value
        self.barrier.wait()
        everything = list(self.said)
        self.barrier.wait()
        return everything


class Manager:
    """One rank of a group."""

    def __init__(self, every: int, rank: int, group: Group) -> None:
        self.config = MultiGPUConfig(verify_every=every)
        self.identity = SimpleNamespace(rank=rank, world_size=len(group.said))
        self.group = group
        self.num_gathers = 0

    def gather_int64(self, values: list[int]) -> list[list[int]]:
        self.num_gathers += 1
        return self.group.exchange(self.identity.rank, list(values))

    def gather_texts(self, text: str) -> list[str]:
        return self.group.exchange(self.identity.rank, text)


def checked_by(
    models: list[Any],
    extras: list[str] | None = None,
    *,
    steps: list[int] | None = None,
    every: list[int] | None = None,
) -> list[str]:
    """What each rank's check of its model raises, "" for nothing."""
    from unsloth_multigpu.group.replicas import ReplicaProof

    group = Group(len(models))
    extras, steps, every = extras or [""] * len(models), steps or [7] * len(models), every or [1] * len(models)

    def check(rank: int) -> str:
        step = steps[rank]
        proof = ReplicaProof(Manager(every[rank], rank, group), lambda: {"plan": extras[rank]})  # type: ignore[arg-type]
        try:
            proof.check(models[rank], step)
        except DivergenceError as error:
            return f"{error} Hint: {error.hint}"
        assert not proof.is_unchecked(step)
        return ""

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(check, range(len(models))))


def model(**changes: float) -> Any:
    """Two layers of ones; `changes` are added to one weight of the layer that they name."""
    import torch
    from torch import nn

    result = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b")})
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            parameter.fill_(1)
            if name.endswith("weight"):
                parameter[1, 1] += changes.get(name.split(".")[0], 0)
    return result


@pytest.mark.parametrize(
    ("every", "start", "due"),
    [
        (0, 0, []),
        (3, 0, [1, 2, 3, 6]),
        # What differs from a step on is found before as many more are done.
        (100, 0, [1, 2, 4, 8, 16, 32, 64, 100, 200]),
        (100, 30, [31, 32, 34, 38, 46, 62, 94, 100, 200]),
    ],
)
def test_check_is_due_as_the_steps_double_and_every_so_many(every: int, start: int, due: list[int]) -> None:
    from unsloth_multigpu.group.replicas import ReplicaProof

    manager = Manager(every, 0, Group(1))
    manager.identity.world_size = 2
    proof = ReplicaProof(manager)  # type: ignore[arg-type]
    steps = []
    for step in range(start + 1, max([*due, 6]) + 1):
        if proof.is_due(step):
            proof.check(model(), step)
            steps.append(step)
    assert steps == due
    assert manager.num_gathers == len(due)


def test_weights_that_ddp_leaves_to_each_rank_are_not_compared() -> None:
    def with_own(change: float) -> Any:
        result = model(b=change)
        result._ddp_params_and_buffers_to_ignore = ["b.weight"]
        return result

    assert checked_by([with_own(0.0), with_own(1.0)]) == ["", ""]
    frozen = [model(), model(b=1.0)]
    for each in frozen:
        each["b"].requires_grad_(False)
    assert checked_by(frozen) == ["", ""]


def test_weights_made_of_other_tensors_are_compared_part_by_part() -> None:
    import torch
    from torch import nn
    from torch.testing._internal.two_tensor import TwoTensor

    def with_parts(last: float) -> Any:
        result = nn.Module()
        inner = TwoTensor(torch.ones(3), torch.tensor([1.0, 1.0, last]))
        result.weight = nn.Parameter(TwoTensor(inner, TwoTensor(torch.zeros(3), torch.zeros(3))))
        return result

    assert checked_by([with_parts(1.0), with_parts(1.0)]) == ["", ""]
    for error in checked_by([with_parts(1.0), with_parts(2.0)]):
        assert "rank 0 and rank 1 differ in 1 of 4 trainable tensors: weight.a.b." in error
