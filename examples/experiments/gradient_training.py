"""One training after the other on the ranks of gradient_sync.py, and what is measured in each."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from gradient_task import TASKS, Data, Task, accuracy_of, loss_of
from gradient_variant import VARIANTS, Variant
from torch import nn
from torch.nn.utils import parameters_to_vector

from unsloth_multigpu.errors import DivergenceError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.replicas import ReplicaProof
from unsloth_multigpu.strategies.sync import GradientSync


def run_task(name: str, options: argparse.Namespace, manager: DDPManager) -> dict[str, Any]:
    """Trains every variant with every seed; DDP first, with which the others are compared."""
    task = TASKS[name]
    num_epochs = options.epochs or task.num_epochs
    variants: dict[str, Any] = {}
    ddp_weights: dict[int, torch.Tensor] = {}
    for variant in VARIANTS.values():
        begin = time.perf_counter()
        runs = []
        for seed in range(min(options.seeds, task.max_seeds)):
            run, weights = train(task, variant, num_epochs, seed, manager)
            if variant.name == "ddp":
                ddp_weights[seed] = weights
            ddp = ddp_weights[seed]
            run["distance_from_ddp"] = float((weights - ddp).norm() / ddp.norm())
            runs.append(run)
        facts = {key: getattr(variant, key) for key in ("label", "kind", "is_bug", "what")}
        variants[variant.name] = {**facts, "runs": runs}
        tell(manager, f"{name:9} {variant.label:36} {time.perf_counter() - begin:5.1f} s  {runs[0]['proof']}")
    has_buffers = any(True for _ in task.make_model().buffers())
    facts = {"what": task.what, "learning_rate": task.learning_rate, "num_epochs": num_epochs}
    return {**facts, "has_buffers": has_buffers, "variants": variants}


def train(
    task: Task, variant: Variant, num_epochs: int, seed: int, manager: DDPManager
) -> tuple[dict[str, Any], torch.Tensor]:
    """One training on all ranks.

    Returns:
        What was measured, and this rank's weights at the end, flat.
    """
    torch.manual_seed(1000 * seed + (manager.identity.rank if variant.has_own_seeds else 0))
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters(), task.learning_rate * variant.learning_rate_factor)
    sync = variant.make(model, optimizer)
    sync.begin()
    run = loop(task, variant, sync, num_epochs, seed, manager)
    sync.synchronize()
    return run, parameters_to_vector(model.parameters()).detach()


def loop(
    task: Task, variant: Variant, sync: GradientSync, num_epochs: int, seed: int, manager: DDPManager
) -> dict[str, Any]:
    """The training loop: as in a script for one GPU, with the strategy's two calls around the optimizer's step."""
    data, model = task.read_data(), sync.model
    forward = getattr(sync, "wrapped", model)
    updates, proof = UpdateLog(sync.optimizer), Proof(manager, is_on=len(variant.workers) > 1)
    first_rows = next(deal(len(data.inputs), variant, seed, 0))
    cosine = gradient_cosine(copy.deepcopy(model), data.inputs[first_rows], data.targets[first_rows], variant.workers)
    epochs = []
    step = 0
    for epoch in range(num_epochs):
        losses = []
        for rows in deal(len(data.inputs), variant, seed, epoch):
            model.zero_grad()
            if len(rows):
                loss = loss_of(forward, data.inputs[rows], data.targets[rows])
                loss.backward()
                losses.append(loss.detach())
            sync.after_backward()
            sync.optimizer.step()
            sync.after_step()
            step += 1
            # Every step of the first epoch, then at the end of each: the figures do not need more, and time matters.
            if epoch == 0 and sync.are_replicas_equal:
                proof.check(model, step)
        sync.synchronize()
        proof.check(model, step)
        epochs.append(measure(model, data, losses, variant, manager))
    return {
        "epochs": epochs,
        "num_steps": step,
        # Rank by rank: the workers of a parameter server make none, their weights come from rank 0.
        "num_updates": manager.gather_json(updates.num_updates),
        "gradient_norm": manager.gather_json(updates.first_norm)[0],
        "gradient_cosine": cosine,
        "proof": proof.verdict,
    }


def deal(num_rows: int, variant: Variant, seed: int, epoch: int) -> Iterator[torch.Tensor]:
    """This rank's rows of every step of an epoch; none on a rank that only serves. The last rows may be left over."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    size, num_workers, rank = variant.rows_per_worker, len(variant.workers), dist.get_rank()
    for start in range(0, num_rows - size * num_workers + 1, size * num_workers):
        parts = order[start : start + size * num_workers].split(size)
        yield parts[variant.workers.index(rank)] if rank in variant.workers else order[:0]


def measure(
    model: nn.Module, data: Data, losses: list[torch.Tensor], variant: Variant, manager: DDPManager
) -> dict[str, Any]:
    """Loss over the epoch's steps and all workers; accuracy and distance of each rank's weights at its end."""
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    found = manager.gather_json([mean_loss, accuracy_of(model, data)])
    weights = gather([p.detach() for p in model.parameters()])
    distances = [float((w - weights[0]).norm() / weights[0].norm()) for w in weights]
    return {
        "loss": sum(found[rank][0] for rank in variant.workers) / len(variant.workers),
        "accuracy": found[0][1],
        "accuracy_of_ranks": [row[1] for row in found],
        # One process is rank 0 alone here; the others have nothing to be compared with.
        "divergence": max(distances) if len(variant.workers) > 1 else 0.0,
    }


def gradient_cosine(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, workers: tuple[int, ...]
) -> float | None:
    """Mean cosine between the gradients of any two workers. The model is a copy: gradients stay in it."""
    if len(inputs):
        loss_of(model, inputs, targets).backward()
    of_ranks = gather([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    pairs = list(combinations([of_ranks[rank] for rank in workers], 2))
    cosines = [float(torch.cosine_similarity(one, other, dim=0)) for one, other in pairs]
    return sum(cosines) / len(cosines) if cosines else None


def gather(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's tensors as one flat tensor. Collective."""
    mine = parameters_to_vector(tensors).detach()
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    return of_ranks


class UpdateLog:
    """Counts the steps of an optimizer that change something, and keeps the gradient's norm in the first of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_updates = 0
        self.first_norm = 0.0
        optimizer.register_step_pre_hook(self._on_step)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients and not self.num_updates:
            self.first_norm = float(torch.stack([g.norm() for g in gradients]).norm())
        self.num_updates += bool(gradients)


class Proof:
    """The product's replica proof after every step, until it finds something: the training goes on to show the rest."""

    def __init__(self, manager: DDPManager, *, is_on: bool) -> None:
        self._proof = ReplicaProof(manager)
        self._is_on = is_on
        self.verdict = "equal" if is_on else "-"

    def check(self, model: nn.Module, step: int) -> None:
        if not self._is_on:
            return
        try:
            self._proof.check(model, step)
        except DivergenceError as error:
            self._is_on = False
            self.verdict = f"caught after step {step}: {error.args[0]}"


def tell(manager: DDPManager, text: str) -> None:
    if manager.identity.rank == 0:
        print(text.partition(". ")[0], flush=True)
