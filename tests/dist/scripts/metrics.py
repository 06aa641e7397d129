"""Trains several kinds of Trainers in one process group and writes all that they logged on each rank.

Usage: metrics.py RANKS MODEL OUT JOB...
A job is a kind, rows x batch size x accumulation, and after how many steps it logs ("end": only when it ends). "eval"
evaluates 11 rows in batches of 4 after every second step, "resume" goes on from the second step. The kind "own"
collects a metric of its own, as a tensor and without a gather, and "nan" has some losses that are none.
"""

import functools
import shutil
import sys
from pathlib import Path

import unsloth_multigpu as ump

model_folder, out, jobs = sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
ump.enable_multi_gpu(num_gpus=int(sys.argv[1]))

import torch
import trl.trainer.utils
from common import RANK, Calls, arguments, new_classifier, new_drawing, write_facts
from datasets import Dataset
from texts import Texts
from transformers import DataCollatorWithPadding, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from examples.tiny_model import topics
from tests.helpers.log_probs import LogProbs

trl.trainer.utils._ChunkedLogProbFunction = LogProbs
tiny = Texts(model_folder)
out.mkdir(parents=True, exist_ok=True)


def trl_trainer(trainer, config, rows, evaluated, common, **settings):
    return trainer(
        model=new_classifier(model_folder, 1, tiny.tokenizer) if trainer is trl.RewardTrainer else tiny.causal_lm(),
        args=common(config, max_length=96, **settings),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(evaluated),
        processing_class=tiny.tokenizer,
    )


def sft(texts, evaluated, common, trainer=SFTTrainer):
    rows, few = ([{"text": text} for text in part] for part in (texts, evaluated))
    return trl_trainer(trainer, SFTConfig, rows, few, common, dataset_text_field="text", loss_type="nll")


class OwnMetricTrainer(SFTTrainer):
    """Collects a mean over rows of its own."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            self._metrics["train"]["length"].append(inputs["attention_mask"].sum(1).double().mean())
        return super().compute_loss(model, inputs, *args, **kwargs)


def own(texts, evaluated, common):
    return sft(texts, evaluated, common, OwnMetricTrainer)


def pairs(texts):
    return [{"prompt": t[:20], "chosen": t[20:], "rejected": t[20:][::-1]} for t in texts]


def dpo(texts, evaluated, common):
    return trl_trainer(DPOTrainer, DPOConfig, pairs(texts), pairs(evaluated), common)


def reward(texts, evaluated, common):
    return trl_trainer(trl.RewardTrainer, trl.RewardConfig, pairs(texts), pairs(evaluated), common)


def unpaired(texts):
    return [{"prompt": t[:20], "completion": t[20:], "label": i % 3 == 0} for i, t in enumerate(texts)]


def kto(texts, evaluated, common):
    # The default loss measures the rows of a micro-batch by each other.
    settings = {"loss_type": "apo_zero_unpaired"}
    return trl_trainer(KTOTrainer, KTOConfig, unpaired(texts), unpaired(evaluated), common, **settings)


def labelled(texts):
    return tiny.tokenized(texts).add_column("labels", [i % 2 for i in range(len(texts) - 1)] + [2])


class NanTrainer(Trainer):
    """The row with label 2 makes the loss no number, and has a gradient all the same."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        spoilt = self.state.global_step and model.training and bool((inputs["labels"] == 2).any())
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + torch.tensor(float("nan")) if spoilt else loss


def classifier(texts, evaluated, common, trainer=Trainer):
    return trainer(
        model=new_classifier(model_folder, 3, tiny.tokenizer),
        args=common(include_num_input_tokens_seen="all"),
        train_dataset=labelled(texts),
        eval_dataset=labelled(evaluated),
        data_collator=DataCollatorWithPadding(tiny.tokenizer),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )


def nan(texts, evaluated, common):
    return classifier(texts, evaluated, common, NanTrainer)


def grpo(texts, evaluated, common):
    # The likeliest token, so that one process and several generate the same.
    config = common(GRPOConfig, num_generations=4, max_completion_length=8, top_k=1, beta=0.1)
    return new_drawing(GRPOTrainer, model_folder, config, [text[:20] for text in texts], variety)


def variety(completions, **_):
    return [float(len(set(c))) for c in completions]


def pause(args, state, control, **kwargs):
    if state.global_step == 2:
        control.should_save = control.should_training_stop = True


def settings_of(shape, options, folder):
    _, batch_size, accumulation = map(int, shape.split("x"))
    logging = options[0]
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    return functools.partial(
        *(arguments, folder, batch_size, accumulation),
        num_train_epochs=2,
        learning_rate=2e-3,
        optim="sgd",
        logging_strategy="no" if logging == "end" else "steps",
        logging_steps=1 if logging == "end" else int(logging),
        seed=7,
        use_cpu=True,
        **(evaluation if "eval" in options else {}),
    )


def made(kind, shape, options, folder):
    torch.manual_seed(3)
    texts, evaluated = topics(int(shape.split("x")[0]), max_words=40), topics(11, max_words=40, seed=1)
    return globals()[kind](texts, evaluated, settings_of(shape, options, folder))


def run(job):
    kind, shape, options = job.split(":")
    options = options.split("+")
    name = job.replace(":", "_")
    folder = out / f"{name}_checkpoints"
    checkpoint = None
    if "resume" in options:
        trainer = made(kind, shape, options, folder)
        trainer.add_callback(Calls(on_step_end=pause))
        trainer.train()
        checkpoint = str(folder / "checkpoint-2")
    trainer = made(kind, shape, options, folder)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    facts = {
        "training_loss": result.training_loss,
        "metrics": result.metrics,
        "state": {k: v for k, v in vars(trainer.state).items() if k != "stateful_callbacks"},
        "stateful_callbacks": trainer.state.stateful_callbacks,
        "evaluated": trainer.evaluate() if "eval" in options else {},
        "collected": {mode: dict(kept) for mode, kept in getattr(trainer, "_metrics", {}).items()},
    }
    write_facts(out / name, facts, default=float)
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)


for job in jobs:
    run(job)
