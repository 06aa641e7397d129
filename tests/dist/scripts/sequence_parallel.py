"""Trains a Trainer of transformers or TRL whose ranks share samples, and writes what it did, for comparison.

Usage: sequence_parallel.py MODEL OUT JOBS [OPTION=VALUE ...], with JOBS in commas and options of the line.
Of a training that is refused it writes the error.
"""

import sys
from pathlib import Path

import unsloth_multigpu as ump

model_folder, out, jobs, *options = sys.argv[1:]
ump.enable_multi_gpu(**{k: int(v) if v.isdigit() else v for k, v in (each.split("=") for each in options)})

import torch
from common import SGD, logged, move_off_zero, write_facts, write_outcome
from tiny_llama import RaggedRows, collate, collate_end_to_end
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

COMMON = {**SGD, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
folder = str(Path(out) / "checkpoints")


def llama(num_kv=2, attention="sdpa", **more):
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=num_kv, attn_implementation=attention, **more))


def of_transformers(model, collate=collate, cls=Trainer, **more):
    common = TrainingArguments(folder, **{**COMMON, **more})
    return cls(model=model, args=common, train_dataset=RaggedRows(10), data_collator=collate)


def qwen_with_window():
    shape = {**SHAPE, "num_hidden_layers": 3, "head_dim": 8, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**shape, use_sliding_window=True, sliding_window=5, max_window_layers=1))


def lora():
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    return of_transformers(move_off_zero(get_peft_model(llama(), adapter)))


def sft(**layout):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.helpers.log_probs import LogProbs

    LogProbs.use()
    config = SFTConfig(folder, **COMMON, bf16=False, **layout)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    return SFTTrainer(
        model=llama(), args=config, train_dataset=Dataset.from_list(list(RaggedRows(10))), processing_class=tokenizer
    )


class RowMean(Trainer):
    """A loss that needs the logits of whole rows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).logits.float().logsumexp(-1).mean(1).mean()


JOBS = {
    "full": lambda: of_transformers(llama()),
    "one_kv_head": lambda: of_transformers(llama(num_kv=1), gradient_checkpointing=True),
    "packed": lambda: of_transformers(llama(), collate_end_to_end),
    "window": lambda: of_transformers(qwen_with_window()),
    "lora": lora,
    "sft": sft,
    "eager": lambda: of_transformers(llama(attention="eager")),
    "row_mean": lambda: of_transformers(llama(), cls=RowMean),
}
out = Path(out)
out.mkdir(parents=True, exist_ok=True)
for job in jobs.split(","):
    torch.manual_seed(3)
    trainer = JOBS[job]()
    try:
        trainer.train()
    except ump.SetupError as error:
        write_facts(out / job, [str(error), trainer.state.global_step])
        continue
    facts = {"log": trainer.state.log_history, **logged(trainer, "loss", "grad_norm")}
    facts["total_tokens"] = getattr(trainer, "_total_train_tokens", 0)
    write_outcome(out, job, facts, ((n, p) for n, p in trainer.model.named_parameters() if p.requires_grad))
