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


@pytest.mark.parametrize(("every", "is_best_loaded", "steps"), [(2, False, []), (2, True, [4]), (0, True, [])])
def test_best_checkpoint_is_compared_although_the_last_step_was(
    every: int, is_best_loaded: bool, steps: list[int]
) -> None:
    import torch

    from unsloth_multigpu.group.replicas import ReplicaProof
    from unsloth_multigpu.train.progress import Progress

    manager = Manager(every, 0, Group(1))
    manager.identity.world_size = 2
    replicas = ReplicaProof(manager)  # type: ignore[arg-type]
    checked: list[int] = []
    replicas.check = lambda _model, step, _beside: checked.append(step)  # type: ignore[method-assign, assignment]
    replicas._last_equal_step = 4 if every else None
    model = torch.nn.Linear(1, 1)
    trainer = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()))
    progress = Progress(trainer, manager, None, replicas, None, None)  # type: ignore[arg-type]
    state, args = SimpleNamespace(global_step=4), SimpleNamespace(load_best_model_at_end=is_best_loaded)
    progress.on_train_end(args, state, None)
    assert checked == steps


def test_facts_that_differ_are_named_before_the_weights() -> None:
    for error in checked_by([model(), model(b=1.0)], ["mine", "theirs"]):
        assert "after step 7: plan: rank 0 has mine, rank 1 has theirs." in error
    for error in checked_by([model(), model()], steps=[7, 8]):
        assert ": step: rank 0 has 7, rank 1 has 8." in error
    for error in checked_by([model(), model()], every=[1, 2]):
        assert ": config: rank 0 has {" in error
        assert "'verify_every': 2" in error


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
