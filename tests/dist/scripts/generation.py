"""Trains GRPO and RLOO on completions that depend on the prompt and on their place in its group alone.

Usage: generation.py RANKS MODEL OUT JOB...; 1 rank is TRL by itself. A job is trainer:batch x accumulation:loss type.
With ":old" a generation serves two steps, twice, with a KL term: log-probabilities of old and reference models count.
"lost" is a mistake in our own dealing; "tools", "drift" and "third" are trainers of the script's own.
"drawn" draws completions, which are longer on rank 1. Behind an "@" a job has options, see OPTIONS. Of a training that
is refused the error is written.
"""

import json
import sys
import unittest.mock
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, model, out, jobs = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
if num_ranks > 1:
    ump.enable_multi_gpu(num_gpus=num_ranks)

import torch
from common import RANK, SGD, LogProbsInTorch, Said, arguments, logged, new_drawing, write_outcome
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.helpers.cpu_fsdp import allow_cpu_ranks
from unsloth_multigpu.group.shards import whole_of
from unsloth_multigpu.step import completions

allow_cpu_ranks()
GROUP = 3
OPTIONS = {
    "": {},
    "off": {"balance": "off"},
    "tokens": {"balance": "tokens"},
    "blind": {"balance": "tokens", "check_first_step": "off"},
    "shard": {"shard": "on"},
}


def completions_of(prompt_ids):
    """What stands in for a draw: of the rows of all ranks, which lie in order, each group of a prompt has the same."""
    first = RANK * len(prompt_ids)
    for i, ids in enumerate(prompt_ids):
        place = (first + i) % GROUP
        length = 3 + 2 * place + sum(ids) % 7
        yield [20 + (7 * sum(ids) + 11 * place + 5 * k) % 900 for k in range(length)]


class PlainTorch(LogProbsInTorch):
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
        if torch.is_grad_enabled():  # The loss of a micro-batch.
            self.shapes.append([*input_ids.shape, int(attention_mask.sum())])
        return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)


class Grpo(PlainTorch, GRPOTrainer):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return list(completions_of(prompt_ids)), None


class Drift(Grpo):
    """As GRPO while the policy is the one that drew; then it depends on the micro-batch."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.newest = found[0].detach()
        return found

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        return loss * (1 + ((self.newest - inputs["old_per_token_logps"]) * inputs["completion_mask"]).abs().max())


class Third(Grpo):
    """As GRPO in the first two steps; then it depends on the micro-batch."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        return loss * (inputs["completion_mask"].sum() if self.state.global_step > 1 else 1)


class Tools(Grpo):
    """Some tokens of a completion are answers of a tool, and not trained; each completion has a ratio of sampling."""

    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        ids = made["completion_ids"]
        return {**made, "tool_mask": (ids % 3 > 0).int(), "importance_sampling_ratio": ids[:, :1] / 500}

    def _compute_loss(self, model, inputs):
        ratio = inputs["importance_sampling_ratio"][:, 0]
        return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * ratio})


class Drawn(PlainTorch, GRPOTrainer):
    """Generates itself, in more steps on rank 1."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generation_config.max_new_tokens = 4 + 6 * RANK


class Rloo(PlainTorch, RLOOTrainer):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return list(completions_of(prompt_ids))


def without_the_first(taken):
    """The weight of a micro-batch's first completion is lost."""

    def mistaken(*args):
        micro_batch = taken(*args)
        return micro_batch | {"advantages": micro_batch["advantages"].index_fill(0, torch.tensor([0]), 0.0)}

    return mistaken


CLASSES = {
    "grpo": (Grpo, GRPOConfig),
    "rloo": (Rloo, RLOOConfig),
    "tools": (Tools, GRPOConfig),
    "drift": (Drift, GRPOConfig),
    "third": (Third, GRPOConfig),
    "drawn": (Drawn, GRPOConfig),
    "lost": (Grpo, GRPOConfig),
}


def shape_of(config):
    names = "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size"
    return [getattr(config, name) for name in names.split()]


def rebuilt_from(config, batch, accumulation):
    """A script may build its arguments from others. TRL takes one of two that are told together."""
    for name in ("steps_per_generation", "generation_batch_size"):
        given = {n: v for n, v in config.to_dict().items() if n != name and not n.endswith("_token")}
        assert (given["per_device_train_batch_size"], given["gradient_accumulation_steps"]) == (batch, accumulation)
        again = type(config)(**json.loads(json.dumps(given)))
        assert shape_of(again) == shape_of(config)
    return again


def reward(completion_ids, **_):
    return [float(sum(ids) % 17) for ids in completion_ids]


def run(job):
    what, _, option = job.partition("@")
    kind, shape, loss, *more = what.split(":")
    if num_ranks > 1:
        ump.disable_multi_gpu()
        ump.enable_multi_gpu(num_gpus=num_ranks, **OPTIONS[option])
    batch, accumulation = map(int, shape.split("x"))
    trainer_class, config_class = CLASSES[kind]
    config = arguments(
        *(out / "checkpoints", batch, accumulation, config_class),
        num_generations=GROUP,
        max_completion_length=16,
        max_steps=5 if more else 2,
        **{**SGD, "learning_rate": 0.1},
        **({"loss_type": loss} if loss else {}),
        **({"steps_per_generation": 2 * accumulation, "num_iterations": 2, "beta": 0.2} if more else {}),
    )
    if loss != "bnpo":  # It is warned of where arguments are made.
        config = rebuilt_from(config, batch, accumulation)
    prompts = [f"{word} {word[::-1]}" for word in ["abcd"[i % 4] * i for i in range(1, 17)]]
    trainer = new_drawing(trainer_class, model, config, prompts, reward)
    trainer.shapes = []
    taken = without_the_first(completions._taken) if kind == "lost" else completions._taken
    with unittest.mock.patch.object(completions, "_taken", taken):
        error = Said().train(trainer)
    if error is not None:
        (out / f"{job}_{RANK}.txt").write_text(str(error))
        return
    names = ["grad_norm", *([] if more else ["reward"])]  # Which is of a step that draws.
    facts = {**logged(trainer, *names), "shapes": trainer.shapes}
    write_outcome(out, job, facts, ((name, whole_of(p)) for name, p in trainer.model.named_parameters()))


out.mkdir(parents=True, exist_ok=True)
for job in jobs:
    run(job)
