"""The hash of the replica proof sees every bit, and the message names ranks and tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unsloth_multigpu.config import MultiGPUConfig
from unsloth_multigpu.errors import DivergenceError


def hash_of(tensor: Any) -> int:
    from unsloth_multigpu.proof.replicas import tensor_hashes

    return tensor_hashes([tensor])[0]


def bits(tensor: Any) -> Any:
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unsloth_multigpu.proof.replicas._CPU_CHUNK", 4)


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
            assert changed is not tensor
            hashes.add(hash_of(changed))
    assert len(hashes) == 1 + len(tensor) * num_bits


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_flipped_signs_of_two_elements_do_not_cancel(small_chunks: None, name: str) -> None:
    import torch

    tensor = torch.ones(9, dtype=getattr(torch, name))
    hashes = set()
    for first in range(9):
        for second in range(first):
            changed = tensor.clone()
            changed[[first, second]] *= -1
            hashes.add(hash_of(changed))
    assert len(hashes) == 36


def test_hash_knows_the_place_also_between_chunks(small_chunks: None) -> None:
    import torch

    hashes = {hash_of(torch.eye(40)[i]) for i in range(40)}
    assert len(hashes) == 40


def test_hash_of_any_strides_is_stable_and_sees_each_element(small_chunks: None) -> None:
    import torch

    base = torch.arange(3 * 5 * 7, dtype=torch.float32).view(3, 5, 7)
    for tensor in (base.permute(2, 0, 1), base[:, ::2], base.transpose(0, 1)[1:], base.flatten()[:1]):
        before = hash_of(tensor)
        assert hash_of(tensor) == before
        hashes = {before}
        for place in torch.cartesian_prod(*(torch.arange(n) for n in tensor.shape)).view(-1, tensor.dim()).tolist():
            tensor[tuple(place)] += 0.5
            hashes.add(hash_of(tensor))
            tensor[tuple(place)] -= 0.5
        assert len(hashes) == 1 + tensor.numel()


def test_empty_scalar_and_complex_tensors_have_a_hash() -> None:
    import torch

    assert hash_of(torch.zeros(0)) == hash_of(torch.zeros(0, 3).t()) == 0
    assert hash_of(torch.tensor(1.0)) != hash_of(torch.tensor(2.0))
    assert hash_of(torch.tensor([1 + 2j])) != hash_of(torch.tensor([1 - 2j]))


def test_hash_is_the_sum_of_weighted_bits_modulo_2_to_64() -> None:
    import torch

    from unsloth_multigpu.proof.replicas import _odd_weights

    tensor = torch.randn(5, generator=torch.Generator().manual_seed(1))
    weights, factor = (_odd_weights(5, tensor.device, seed=s).tolist() for s in (0, 1))
    assert all(w % 2 == 1 for w in weights)
    total = sum(w * b for w, b in zip(weights, bits(tensor).tolist(), strict=True)) * factor[0]
    assert hash_of(tensor) % 2**64 == total % 2**64


def test_hash_leaves_the_tensor_and_its_graph_alone() -> None:
    import torch

    tensor = torch.randn(4, dtype=torch.float64, requires_grad=True)
    before = tensor.detach().clone()
    hash_of(tensor)
    assert torch.equal(tensor, before)
    assert tensor.is_leaf
    assert tensor.grad_fn is None


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ([[1, 1], [1, 2]], "rank 0 and rank 1 differ in 1 of 2 trainable tensors: b"),
        ([[1, 1], [1, 1], [3, 1]], "rank 2 differs from the other ranks in 1 of 2 trainable tensors: a"),
        ([[9, 1], [1, 1], [1, 1]], "rank 0 differs from the other ranks in 1 of 2 trainable tensors: a"),
        (
            [[1, 1], [2, 1], [1, 3]],
            "rank 1 differs from the other ranks in 1 of 2 trainable tensors: a; "
            "rank 2 differs from the other ranks in 1 of 2 trainable tensors: b",
        ),
        ([[1, 1], [2, 1], [3, 1]], "rank 0 and rank 1 and rank 2 differ in 1 of 2 trainable tensors: a"),
        ([[1, 1], [1, 1], [2, 1], [2, 1]], "ranks 0, 1 and ranks 2, 3 differ in 1 of 2 trainable tensors: a"),
        (
            [[1, 1], [1, 1], [1, 1], [2, 1], [3, 1]],
            "ranks 3, 4 differ from the other ranks in 1 of 2 trainable tensors: a",
        ),
    ],
)
def test_message_names_the_minority(hashes: list[list[int]], message: str) -> None:
    from unsloth_multigpu.proof.replicas import describe_divergence

    assert describe_divergence(["a", "b"], hashes) == message


def test_message_names_the_first_tensors_and_counts_the_rest() -> None:
    from unsloth_multigpu.proof.replicas import describe_divergence

    names = [f"t{i}" for i in range(9)]
    found = describe_divergence(names, [[0] * 9, [1] * 6 + [0] * 3])
    assert found == "rank 0 and rank 1 differ in 6 of 9 trainable tensors: t0, t1, t2, t3 and 2 more"


class Manager:
    """Rank 0 of two; `other` changes what rank 1 says."""

    identity = SimpleNamespace(world_size=2)

    def __init__(self, every: int, other: Any = lambda said: said) -> None:
        self.config = MultiGPUConfig(verify_every=every)
        self.other = other
        self.num_gathers = 0

    def gather_int64(self, values: list[int]) -> list[list[int]]:
        self.num_gathers += 1
        return [values, [v + (self.other("") != "") for v in values]]

    def gather_texts(self, text: str) -> list[str]:
        return [text, self.other(text)]


def proof(manager: Manager, extra: Any = str) -> Any:
    from unsloth_multigpu.proof.replicas import ReplicaProof

    return ReplicaProof(manager, extra)  # type: ignore[arg-type]


def model() -> Any:
    from torch import nn

    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("every", "start", "due"),
    [(0, 0, []), (1, 0, [1, 2, 3, 4, 5, 6]), (3, 0, [1, 3, 6]), (3, 4, [5, 6, 9]), (100, 0, [1]), (2, 1, [2, 4, 6])],
)
def test_check_is_due_after_the_first_step_and_every_so_many(every: int, start: int, due: list[int]) -> None:
    manager = Manager(every)
    checked = proof(manager)
    steps = []
    for step in range(start + 1, max([*due, 6]) + 1):
        if checked.is_due(step):
            checked.check(model(), step)
            steps.append(step)
    assert steps == due
    assert manager.num_gathers == len(due)


def test_facts_that_differ_are_named() -> None:
    checked = proof(Manager(1, lambda text: text.replace("mine", "theirs") or "different"), lambda: "mine")
    with pytest.raises(DivergenceError, match="after step 7: plan: rank 0 has mine, rank 1 has theirs"):
        checked.check(model(), 7)


def test_gathered_integers_keep_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    from unsloth_multigpu.core.manager import DDPManager

    def all_gather(into: list[Any], mine: Any) -> None:
        for tensor in into:
            tensor.copy_(mine)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr("unsloth_multigpu.core.manager._wire_device", lambda: torch.device("cpu"))
    manager = DDPManager(SimpleNamespace(world_size=2), MultiGPUConfig())  # type: ignore[arg-type]
    big = [2**63 - 1, -(2**63), 2**53 + 1]
    assert manager.gather_int64(big) == [big, big]
