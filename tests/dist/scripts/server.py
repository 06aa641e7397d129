"""Trains GRPO on completions that depend on the prompt and on their place in its group alone.

Usage: server.py MODEL OUT STEPS. With UNSLOTH_MULTIGPU_GENERATORS they come from TRL's server, else from here. What was
trained in three steps is written after these.
"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

model, out, num_steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
is_served = "UNSLOTH_MULTIGPU_GENERATORS" in os.environ
if is_served:
    ump.enable_multi_gpu()

import vllm
from common import RANK, SGD, Calls, LogProbsInTorch, arguments, logged, new_drawing, write_outcome
from trl import GRPOConfig, GRPOTrainer

GROUP = 3
weights = []


class Grpo(LogProbsInTorch, GRPOTrainer):
    pass


class Alone(Grpo):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return [vllm.completion_of(ids, place % GROUP) for place, ids in enumerate(prompt_ids)], None


def write(args, state, *_, **__):
    if state.global_step != 3 or "grad_norm" not in state.log_history[-1]:
        return
    facts = {**logged(trainer, "grad_norm", "reward"), "weights": weights}
    facts |= {"address": args.vllm_server_base_url, "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}
    if is_served:
        facts["server"] = json.loads(Path(os.environ["STAND_IN_REPORT"]).read_text())
    write_outcome(out, "grpo", facts, trainer.model.named_parameters())
    (out / f"written_{RANK}").touch()


def reward(completion_ids, **_):
    """By then the server has the weights of this step."""
    weights.append(sum(float(w.detach().double().cpu().abs().sum()) for w in trainer.model.parameters()))
    return [float(sum(ids) % 17) for ids in completion_ids]


server = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
config = arguments(
    *(out / "checkpoints", 6, 2, GRPOConfig),
    num_generations=GROUP,
    max_completion_length=16,
    max_steps=num_steps,
    **{**SGD, "learning_rate": 0.1},
    **(server if is_served else {"use_cpu": True}),
)
prompts = [f"{'abcd'[i % 4] * i} {i}" for i in range(1, 17)]
trainer = new_drawing(Grpo if is_served else Alone, model, config, prompts, reward, callbacks=[Calls(on_log=write)])
trainer.train()
