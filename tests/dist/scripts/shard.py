"""Trains several kinds of models, sharded or whole, and writes what each step and each rank had, for comparison.

Usage: shard.py RANKS MODEL OUT SAVE_STEPS JOB..., with SAVE_STEPS=0: nothing is saved.
A job is a kind with rows x batch size x accumulation. Before a kind, "asked_": the script itself asks for FSDP2;
"momentum_": SGD with momentum; "epsilon_": Adam with a large epsilon; "adafactor_". Kinds of shard_kinds.py may be
refused.
Variables: ENGINE=unsloth; RESUME=FOLDER of another --out, whose checkpoint of step 3 is resumed from.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import unsloth_multigpu as ump

num_ranks, model_folder, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
save_steps, jobs = int(sys.argv[4]), sys.argv[5:]
# The rest by variables.
ump.enable_multi_gpu(num_gpus=num_ranks)

ENGINE = os.environ.get("ENGINE", "accelerate")
sys.path[:0] = [str(Path(__file__).resolve().parents[3] / "examples"), str(Path(__file__).resolve().parents[3])]
if ENGINE == "unsloth":
    import unsloth  # noqa: F401

import shard_kinds
import torch
from common import QUIET, Calls, move_off_zero
from safetensors.torch import save_file
from texts import Texts
from tiny_model import topics
from transformers import TrainerCallback

from tests.helpers.cpu_fsdp import allow_cpu_ranks
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import fsdp_modules, part_of, whole_of
from unsloth_multigpu.step.passes import StepPasses

allow_cpu_ranks()
rank = int(os.environ.get("RANK", "0"))
texts = Texts(model_folder)
BY_SGD = ("asked_scaled", "asked_full", "unsloth_full", "sft_full")
# Before a kind: what its optimizer is told. Such a large epsilon hides the rounding of small gradients from Adam.
TOLD = {
    "momentum_": {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.1},
    "epsilon_": {"adam_epsilon": 1e-3},
    "adafactor_": {"optim": "adafactor"},
}
# Three ranks share six rows evenly.
LORA = {"r": 6, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj", "up_proj"]}


class ScalesWeights(TrainerCallback):
    def on_evaluate(self, _args, state, control, model, **kwargs):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.98)


def with_lora(model, adapters=2):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
    if adapters > 1:
        model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **LORA))
    return move_off_zero(model, seed=3 + rank)  # Each rank its own: rank 0's are to count.


def qlora():
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return with_lora(texts.causal_lm(quantization_config=config))


def unsloth_lora():
    from unsloth import FastLanguageModel

    return FastLanguageModel.get_peft_model(
        texts.unsloth_lm(), random_state=7, use_gradient_checkpointing=False, **LORA
    )


MODELS = {
    "full": texts.causal_lm,
    # For label smoothing the Trainer asks for the model's class, and a callback changes weights.
    "scaled": texts.causal_lm,
    "lora": lambda: with_lora(texts.causal_lm()),
    "qlora": qlora,
    "sft_full": texts.causal_lm,
    "dpo_lora": lambda: with_lora(texts.causal_lm(), adapters=1),
    "unsloth_full": lambda: texts.unsloth_lm(full_finetuning=True),
    "unsloth_lora": unsloth_lora,
}


class Uploads:
    """Keeps what huggingface_hub is asked to send, in the place of the calls that would send it."""

    def __init__(self, folder):
        from huggingface_hub import HfApi

        self.names, self._folder = [], folder
        HfApi.create_repo = lambda _self, repo_id, **kwargs: SimpleNamespace(repo_id=repo_id)
        HfApi.create_commit = self._commit
        HfApi.upload_folder = self._send

    def _commit(self, repo_id, operations, **kwargs):
        self._keep("commit", {o.path_in_repo: Path(o.path_or_fileobj) for o in operations})

    def _send(self, repo_id, folder_path, ignore_patterns, **kwargs):
        from huggingface_hub.utils import filter_repo_objects

        files = [str(p.relative_to(folder_path)) for p in Path(folder_path).rglob("*") if p.is_file()]
        kept = filter_repo_objects(files, ignore_patterns=[*ignore_patterns, "checkpoint-*/*"])
        self._keep("folder", {name: Path(folder_path, name) for name in kept})

    def _keep(self, kind, files):
        self.names.append([kind, *sorted(files)])
        for name, path in files.items():
            (self._folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self._folder / kind / name)


def trainer_of(kind, rows, args):
    if kind in shard_kinds.KINDS:
        return shard_kinds.trainer_of(kind, len(rows), args)
    model, engine = MODELS[kind.removeprefix("asked_")](), kind.partition("_")[0]
    if engine == "asked":
        args["fsdp"] = num_ranks > 1
    if engine == "dpo":
        import trl.trainer.utils

        from tests.helpers.log_probs import LogProbs

        trl.trainer.utils._ChunkedLogProbFunction = LogProbs  # TRL's own is a kernel for GPUs.
    if engine in ("sft", "dpo"):
        return getattr(texts, engine)(model, rows, {"bf16": False, "gradient_checkpointing": False, **args})
    if engine == "unsloth":
        return texts.sft(model, rows, {"bf16": False, "fp16": False, **args})
    is_scaled = kind.endswith("scaled")
    trainer = texts.plain(model, rows, {**args, "label_smoothing_factor": 0.1 if is_scaled else 0.0})
    if is_scaled or kind.endswith("full"):
        trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2
        trainer.eval_dataset = trainer.train_dataset.select(range(5))
    if is_scaled:
        trainer.add_callback(ScalesWeights())
    return trainer


def num_bytes(tensors):
    return sum(part_of(t).numel() * t.element_size() for t in tensors)


def offload_policies(model):
    """Names of the policies that `fully_shard` was given."""
    states = [module._get_fsdp_state() for module in fsdp_modules(model)]
    return {type(group.offload_policy).__name__ for state in states for group in state._fsdp_param_groups}


# Of one job, and of no training that it goes on from.
seen, norms = [], []
train_step = StepPasses.train


def noted(self, original_step, model, step, *rest, **more):
    seen.append([[p.piece.is_filler, *p.piece.positions] for p in step.micro_batches])
    return train_step(self, original_step, model, step, *rest, **more)


def note_norm(*_, logs, **__):
    norms.extend(float(norm) for name, norm in logs.items() if name == "grad_norm")


StepPasses.train = noted
for job in jobs:
    kind, _, shape = job.partition(":")
    num_rows, batch, accumulation = map(int, shape.split("x"))
    folder = Path(out, job)
    folder.mkdir(parents=True, exist_ok=True)
    args = {
        **QUIET,
        "output_dir": str(folder / "checkpoints"),
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2,
        # Adam amplifies rounding where a gradient is near zero, as many are that belong to rare tokens.
        "learning_rate": 0.1 if kind in BY_SGD else 1e-3,
        "optim": "sgd" if kind in BY_SGD else "adamw_torch",
        "seed": 7,
        "hub_model_id": "user/model",
    }
    if save_steps:
        args |= {"save_strategy": "steps", "save_steps": save_steps}
    for prefix, told in TOLD.items():
        if kind.startswith(prefix):
            kind, args = kind.removeprefix(prefix), {**args, **told}
    trainer = trainer_of(kind, topics(num_rows, max_words=60), args)
    before = {n: whole_of(p.detach()).cpu().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    watcher = Calls(on_log=note_norm)
    trainer.add_callback(watcher)
    seen.clear()
    norms.clear()
    earlier = Path(os.environ["RESUME"], job, "checkpoints", "checkpoint-3") if "RESUME" in os.environ else None
    try:
        trainer.train(resume_from_checkpoint=earlier and str(earlier))
        shard_kinds.train_again(kind, trainer, watcher)
    except SetupError as error:
        if kind not in shard_kinds.KINDS:
            raise
        (folder / f"facts_{rank}.json").write_text(json.dumps({"refused": str(error), "norms": norms}))
        continue
    model = trainer.model
    after = {n: whole_of(p.detach()).cpu().contiguous() for n, p in model.named_parameters() if p.requires_grad}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    states = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]
    facts = {
        "norms": norms,
        "unmoved": [n for n in after if n in before and bool((after[n] == before[n]).all())] if rank == 0 else [],
        "parameter_bytes": num_bytes(model.parameters()),
        "optimizer_bytes": num_bytes(states),
        "micro_batches": seen,
        "offload": sorted(offload_policies(model)),
    }
    (folder / f"facts_{rank}.json").write_text(json.dumps(facts))
    if rank == 0:
        save_file({name: value.clone() for name, value in after.items()}, folder / "weights.safetensors")
    if save_steps or kind == "llava":
        trainer.save_model(str(folder / "save_model"))
        model.save_pretrained(str(folder / "save_pretrained"))
    if save_steps:
        if kind == "lora":
            model.base_model.model.save_pretrained(str(folder / "inside"))
        uploads = Uploads(folder)
        model.push_to_hub("user/model")
        trainer.push_to_hub(blocking=True)
        (folder / f"uploads_{rank}.json").write_text(json.dumps(uploads.names))
