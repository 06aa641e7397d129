"""Trains GRPO with vLLM in colocation: an engine for each rank, whose draws depend on the prompt and its place alone.

Usage: vllm_colocate.py RANKS MODEL OUT [dies]; 1 rank is TRL by itself. `dies` kills rank 1 while its engine loads.
"""

import copy
import os
import signal
import sys
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, model, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if num_ranks > 1:
    ump.enable_multi_gpu(num_gpus=num_ranks)

import torch
import trl.generation.vllm_generation
import vllm
import vllm.model_executor.layers.utils as layers
from common import RANK, SGD, arguments, logged, new_drawing, write_outcome
from trl import GRPOConfig, GRPOTrainer
from vllm.v1.worker.cpu_worker import CPUWorker

# The engine for the CPU packs its weights, after which no others can be loaded.
layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
    layer, "cpu_linear", torch.nn.functional.linear
)


class Engine(vllm.LLM):
    """Draws each completion with a seed of its own, in float32: in bf16 more draws depend on rounding."""

    def __init__(self, **kwargs):
        super().__init__(dtype="float32", **kwargs)

    def generate(self, prompts, sampling_params, **kwargs):
        seeded = [copy.copy(sampling_params) for _ in prompts]
        for place, (prompt, params) in enumerate(zip(prompts, seeded, strict=True)):
            params.seed = 4 * sum(prompt["prompt_token_ids"]) + place % 4
        return super().generate(prompts, sampling_params=seeded, **kwargs)


trl.generation.vllm_generation.LLM = Engine
if "dies" in sys.argv:
    load_model = CPUWorker.load_model

    def load_or_die(self, *args, **kwargs):
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return load_model(self, *args, **kwargs)

    CPUWorker.load_model = load_or_die

drawn = []


def reward(prompts, completion_ids, **_):
    drawn.append([[prompt, list(ids)] for prompt, ids in zip(prompts, completion_ids, strict=True)])
    return [float(sum(ids) % 17) for ids in completion_ids]


if __name__ == "__main__":
    config = arguments(
        *(out / "checkpoints", 4, 2, GRPOConfig),
        num_generations=4,
        max_completion_length=12,
        max_steps=3,
        use_cpu=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=64,
        # The engine computes in another order, so ratios of probabilities differ by rounding.
        vllm_importance_sampling_correction=False,
        **{**SGD, "learning_rate": 0.5},
    )
    prompts = [f"{'abcdefgh'[i % 8]} " * (1 + i % 3) for i in range(24)]
    trainer = new_drawing(GRPOTrainer, model, config, prompts, reward)
    trainer.train()
    out.mkdir(parents=True, exist_ok=True)
    engine = trainer.vllm_generation.llm.llm_engine.vllm_config.parallel_config
    facts = {
        **logged(trainer, "grad_norm", "reward"),
        "drawn": drawn,
        "ranks of the engine": engine.tensor_parallel_size,
    }
    write_outcome(out, "grpo", facts, trainer.model.named_parameters())
