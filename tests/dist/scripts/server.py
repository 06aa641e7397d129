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

import torch
import vllm
from common import SGD, LogProbsInTorch, logged, write_outcome
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP = 3
weights = []


class Grpo(LogProbsInTorch, GRPOTrainer):
    pass


class Alone(Grpo):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return [vllm.completion_of(ids, place % GROUP) for place, ids in enumerate(prompt_ids)], None


class Writes(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        if state.global_step != 3 or "grad_norm" not in state.log_history[-1]:
            return
        facts = {**logged(trainer, "grad_norm", "reward"), "weights": weights}
        facts |= {"address": args.vllm_server_base_url, "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}
        if is_served:
            facts["server"] = json.loads(Path(os.environ["STAND_IN_REPORT"]).read_text())
        write_outcome(out, "grpo", facts, trainer.model.named_parameters())
        (out / f"written_{os.environ.get('RANK')}").touch()


def reward(completion_ids, **_):
    """By then the server has the weights of this step."""
    weights.append(sum(float(w.detach().double().cpu().abs().sum()) for w in trainer.model.parameters()))
    return [float(sum(ids) % 17) for ids in completion_ids]


server = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
trainer = (Grpo if is_served else Alone)(
    model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
    args=GRPOConfig(
        str(out / "checkpoints"),
        per_device_train_batch_size=6,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        max_completion_length=16,
        max_steps=num_steps,
        bf16=False,
        gradient_checkpointing=False,
        **{**SGD, "learning_rate": 0.1},
        **(server if is_served else {"use_cpu": True}),
    ),
    train_dataset=Dataset.from_dict({"prompt": [f"{'abcd'[i % 4] * i} {i}" for i in range(1, 17)]}),
    reward_funcs=reward,
    processing_class=AutoTokenizer.from_pretrained(model),
    callbacks=[Writes()],
)
trainer.train()
