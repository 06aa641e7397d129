"""The hash of the replica proof sees every bit, and the message names ranks and tensors."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.board import manager_of
from unsloth_multigpu.group.replicas import ReplicaProof, describe_divergence, replicated_tensors, tensor_hashes
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.train.evaluation import EqualEvaluations


def hash_of(tensor):
    return tensor_hashes([tensor])[0]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("unsloth_multigpu.group.replicas._CPU_CHUNK", 4)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_every_single_bit_changes_the_hash(small_chunks, name):
    tensor = torch.randn(11, generator=torch.Generator().manual_seed(0)).to(getattr(torch, name))
    hashes = {hash_of(tensor)}
    num_bits = 8 * tensor.element_size()
    kind = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[num_bits]
    for place in range(len(tensor)):
        for bit in range(num_bits):
            changed = tensor.clone()
            changed.view(kind)[place] ^= -(2**bit) if bit == num_bits - 1 else 2**bit
            hashes.add(hash_of(changed))
    assert len(hashes) == 1 + len(tensor) * num_bits


def test_hash_knows_the_place_also_between_chunks(small_chunks):
    hashes = {hash_of(torch.eye(40)[i]) for i in range(40)}
    assert len(hashes) == 40


def test_empty_scalar_and_complex_tensors_have_a_hash():
    assert hash_of(torch.zeros(0)) == hash_of(torch.zeros(0, 3).t()) == 0
    assert hash_of(torch.tensor(1.0)) != hash_of(torch.tensor(2.0))
    assert hash_of(torch.tensor([1 + 2j])) != hash_of(torch.tensor([1 - 2j]))


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ([[1, 1], [1, 2]], "rank 1 differs from rank 0 in 1 of 2 trainable tensors: b"),
        ([[9, 1], [1, 1], [1, 1]], "rank 0 differs from rank 1 in 1 of 2 trainable tensors: a"),
        (
            [[1, 1], [2, 1], [1, 3]],
            "rank 1 differs from rank 0 in 1 of 2 trainable tensors: a; "
            "rank 2 differs from rank 0 in 1 of 2 trainable tensors: b",
        ),
    ],
)
def test_message_names_the_minority_and_one_of_the_other_ranks(hashes, message):
    assert describe_divergence(["a", "b"], hashes) == message


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
def test_check_is_due_as_the_steps_double_and_every_so_many(every, start, due):
    manager, model = manager_of(None, 0, 2, MultiGPUConfig(verify_every=every)), torch.nn.Linear(2, 2)
    proof, steps, gathered = ReplicaProof(manager), [], []
    manager.gather_json = lambda values: gathered.append(values) or [values]  # The other rank says the same.
    for step in range(start + 1, max([*due, 6]) + 1):
        if proof.is_due(step):
            proof.check(model, step)
            steps.append(step)
    assert steps == due
    assert len(gathered) == len(due)


def test_layer_that_is_unfrozen_after_a_step_is_not_compared_in_it():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    trained = frozenset(id(p) for p in model.parameters() if p.requires_grad)
    model[0].requires_grad_(True)
    assert [name for name, _ in replicated_tensors(model, trained)] == ["1.weight", "1.bias"]
    # One that was trained is compared even if it is frozen now.
    model[1].requires_grad_(False)
    assert [name for name, _ in replicated_tensors(model, trained)] == ["1.weight", "1.bias"]
    assert [name for name, _ in replicated_tensors(model)] == ["0.weight", "0.bias"]


def test_buffer_with_another_shape_on_some_rank_is_not_copied():
    model, sent = torch.nn.Module(), []
    model.register_buffer("same", torch.zeros(2))
    model.register_buffer("other", torch.zeros(3))
    manager = manager_of(None, 1, 2)
    manager.gather_json = lambda mine: [{**mine, "other": [[4], "torch.float32"]}, mine]
    manager.broadcast_tensors = sent.extend
    EqualEvaluations(SimpleNamespace(model=model), manager, None).make_equal()
    assert [tensor is model.same for tensor in sent] == [True]
