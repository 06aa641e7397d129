"""Ray Train starts the ranks, the line joins them: a tiny Llama on a local cluster that this script starts itself.

pip install "unsloth-multigpu[ray]"
python examples/ray_train.py --workers 2      # a GPU for each worker, the CPU where there are fewer
python examples/ray_train.py --address auto --workers 16 --folder /shared/run1      # on a cluster that is there
python examples/ray_train.py --workers 0      # the same training in one process, without Ray

Checkpoints are Ray's: `RunConfig(storage_path=...)` says where they lie, and a worker group that Ray starts again goes
on from the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any


def train_loop(options: dict[str, Any]) -> None:
    """What each worker runs, in a thread of its process."""
    import unsloth_multigpu as ump

    # Ray has set RANK and WORLD_SIZE and opened the process group; num_gpus is left out, Ray has counted the workers.
    ump.enable_multi_gpu(device=options["device"])

    from tiny_model import build_tiny, topics
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class ReportToRay(TrainerCallback):
        """Hands each checkpoint to Ray. Ray's own RayTrainReportCallback lets every worker upload a copy of it."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            from ray.train import Checkpoint, report

            logged = {name: value for entry in state.log_history for name, value in entry.items()}
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            checkpoint = Checkpoint.from_directory(folder) if state.is_world_process_zero else None
            report({**logged, "step": state.global_step}, checkpoint=checkpoint)  # On all workers.

    folder = Path(options["folder"])
    name = build_tiny(folder / "tiny_model", hidden_size=32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    texts = topics(30, max_words=40)  # The last step is a smaller one.
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(name),
        train_dataset=[tokenizer(text, truncation=True, max_length=128) for text in texts],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[ReportToRay()] if options["workers"] else [],
        args=TrainingArguments(
            output_dir=str(folder / "checkpoints"),
            per_device_train_batch_size=8,  # Of all workers together, as in one process.
            max_steps=options["steps"],
            learning_rate=1e-3,
            logging_steps=1,
            save_steps=1,
            report_to="none",
            disable_tqdm=True,
        ),
    )
    with contextlib.ExitStack() as stack:
        trainer.train(resume_from_checkpoint=last_checkpoint(stack) if options["workers"] else None)
    trainer.save_model(str(folder / "model"))
    if trainer.is_world_process_zero():
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        (folder / "gradient_norms.json").write_text(json.dumps(norms))
        print(f"{trainer.args.world_size} rank(s) took {trainer.state.global_step} steps; {folder / 'model'}")


def last_checkpoint(stack: contextlib.ExitStack) -> str | None:
    """Where Ray has laid the last checkpoint of this run for this worker; None at the first start."""
    from ray.train import get_checkpoint

    checkpoint = get_checkpoint()
    return None if checkpoint is None else stack.enter_context(checkpoint.as_directory())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2, help="0 = one process, without Ray")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--address", help="of a cluster that is there, or auto; without it the script starts one")
    parser.add_argument("--folder", default="outputs/ray_train")
    options = parser.parse_args()
    folder = Path(options.folder).resolve()  # Workers have working directories of their own.

    import torch

    # A cluster that is there has GPUs elsewhere, too.
    use_gpu = torch.cuda.device_count() >= (1 if options.address else max(1, options.workers))
    config = {**vars(options), "folder": str(folder), "device": "cuda" if use_gpu else "cpu"}
    if not options.workers:
        return train_loop(config)

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    here = str(Path(__file__).resolve().parent)
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))  # For tiny_model.
    # Sets of strings have one order on all workers.
    environment = {"env_vars": {"PYTHONPATH": paths, "PYTHONHASHSEED": "0"}}
    own = {"num_cpus": options.workers, "include_dashboard": False}
    with ray.init(**({"address": options.address} if options.address else own), runtime_env=environment):
        result = TorchTrainer(
            train_loop,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=use_gpu),
            run_config=RunConfig(
                name="ray_train", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
    print(f"last checkpoint: {result.checkpoint.path}, step {result.metrics['step']}")


if __name__ == "__main__":
    main()
