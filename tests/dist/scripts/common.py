"""What several scripts beside this file have in common. They import it behind the line, as users do their modules."""

import json
import logging
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.step.proof import StepProof

# As tests.helpers.
sys.path.append(str(Path(__file__).resolve().parents[3]))
RANK = int(os.environ.get("RANK", "0"))
# Nothing is written or shown but the log of each step.
QUIET = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
# Each gradient shows in the weights as it is.
SGD = {**QUIET, "learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd", "seed": 7}


def arguments(folder, batch_size, accumulation=1, config=TrainingArguments, **more):
    """Of a quiet training in fp32; `more` replaces what is usual."""
    sizes = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    # Which TRL's configs set otherwise.
    plain = {"bf16": False, "gradient_checkpointing": False}
    return config(str(folder), **{**QUIET, **plain, **sizes, **more})


class Comparing:
    """Tells a script's hooks whether a step is computed to be compared with one process, and not yet trained."""

    is_on = False

    @staticmethod
    def watch():
        original = StepProof.before

        def before(*arguments):
            Comparing.is_on = True
            try:
                original(*arguments)
            finally:
                Comparing.is_on = False

        StepProof.before = before


Comparing.watch()


class Said(logging.Handler):
    """Keeps what is said while one job trains, with its level."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.records = []

    def emit(self, record):
        self.records.append((record.levelname, record.getMessage()))

    def train(self, trainer):
        """Returns the error that ends the training, if there is one."""
        logging.getLogger("unsloth_multigpu").addHandler(self)
        try:
            trainer.train()
        except MultiGPUError as error:
            return error
        finally:
            logging.getLogger("unsloth_multigpu").removeHandler(self)
        return None


class Calls(TrainerCallback):
    """Calls functions: event -> what gets (args, state, control, **kwargs) and returns nothing."""

    def __init__(self, **functions):
        vars(self).update(functions)


class Stream(torch.utils.data.IterableDataset):
    """Rows that do not say how many they are."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Record:
    """Notes what `rows_of` finds in the inputs of each forward pass that trains, by its step. Comparisons are none."""

    def __init__(self, trainer, rows_of):
        self.trainer, self.rows_of, self.steps = trainer, rows_of, {}
        trainer.model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, positional, named):
        if module.training and not Comparing.is_on:
            inputs = {"input_ids": positional[0], **named} if positional else named
            self.steps.setdefault(self.trainer.state.global_step, []).extend(self.rows_of(inputs))


def rows_in(inputs):
    """The tokens of each row that has a label, without padding. A filler has none."""
    ids, mask, labels = (inputs.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if ids is None:
        return []
    if "position_ids" in inputs and len(ids) == 1:
        # Texts end to end: each begins at position 0.
        if labels is not None and bool((labels == -100).all()):
            return []
        begins = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
        return ids[0].tensor_split(begins[1:])
    rows = ids if mask is None else [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    has_labels = labels is not None and labels.dim() > 1
    return [row for i, row in enumerate(rows) if not (has_labels and bool((labels[i] == -100).all()))]


class MeanLoss(Trainer):
    """A user's trainer whose loss is a mean over rows, although the model takes loss arguments."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        mask = inputs["attention_mask"]
        loss = ((logits.float().logsumexp(-1) * mask).sum(1) / mask.sum(1)).mean()
        return (loss, {"logits": logits}) if return_outputs else loss


class LogProbsInTorch:
    """Beside a Trainer of TRL that draws completions: TRL's own are a Triton kernel."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        every = logits.log_softmax(-1)
        mine = every.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0]
        return mine, -(every.exp() * every).sum(-1).detach(), None


class InOrder(Trainer):
    """One without shuffling, which is an option of transformers since its version 5."""

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class OwnOrder(Trainer):
    """One whose sampler draws from torch's global random state."""

    def _get_train_sampler(self, *args):
        return torch.utils.data.SubsetRandomSampler(range(len(self.train_dataset)))


def points(count):
    """Rows for `Line`."""
    inputs = torch.tensor([[i % 7 - 3.0, i % 5 - 2.0] for i in range(count)])
    return [{"x": x, "labels": torch.tensor([i % 3 - 1.0])} for i, x in enumerate(inputs)]


class Line(torch.nn.Module):
    """The smallest model that learns from `points`, always with the same weights."""

    def __init__(self, num_inputs=2, num_outputs=1):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(num_inputs, num_outputs)

    def forward(self, x, labels):
        found = self.layer(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


def move_off_zero(model, seed=3):
    """LoRA's B starts at zero, where half of the gradients vanish and a wrong scale would not show."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def new_classifier(folder, num_labels, tokenizer):
    """The model in `folder` with a head of its own, which is always the same."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(5)
    torch.nn.init.normal_(model.score.weight, std=0.05)
    return model


def new_drawing(trainer_class, folder, config, prompts, reward, **more):
    """A Trainer of TRL that draws completions, with the model and the tokenizer in `folder`."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more |= {"model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), "args": config}
    more |= {"train_dataset": Dataset.from_dict({"prompt": prompts}), "reward_funcs": reward}
    return trainer_class(processing_class=AutoTokenizer.from_pretrained(folder), **more)


def logged(trainer, *names):
    """Name -> what was logged under it after each step, the gradient norm among it."""
    steps = [line for line in trainer.state.log_history if "grad_norm" in line]
    return {name: [line[name] for line in steps] for name in names}


def write_facts(path, facts, **options):
    """In a file of this rank, which `facts_of` of tests.helpers.outcome reads."""
    Path(f"{path}_{RANK}.json").write_text(json.dumps(facts, **options))


def write_outcome(out, job, facts, tensors):
    """One file of facts and one of tensors, pairs with their names, which `outcome` of tests.helpers.outcome reads."""
    path = out / job.replace(":", "_")
    write_facts(path, facts)
    kept = {name: tensor.detach().contiguous().clone() for name, tensor in tensors}
    save_file(kept, f"{path}_{RANK}.safetensors")
