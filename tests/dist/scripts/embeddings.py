"""Trains a tiny model of sentence-transformers: 27 pairs, so that the last batch and the last step are incomplete."""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)

model_folder, out = sys.argv[1:]
torch.manual_seed(0)
words = models.Transformer(model_folder, max_seq_length=32)
words.tokenizer.pad_token = words.tokenizer.eos_token
model = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu")
rows = [
    {"sentence1": "one word " * (i % 5 + 1), "sentence2": f"{i} " * (i % 3 + 1), "score": i % 3 / 2} for i in range(27)
]
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "trained",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        logging_steps=1,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=Dataset.from_list(rows),
    loss=losses.CosineSimilarityLoss(model),
)
trainer.train()
if os.environ.get("RANK", "0") == "0":
    log = [row for row in trainer.state.log_history if "loss" in row]
    Path(out).write_text(json.dumps([[row["grad_norm"], row["learning_rate"]] for row in log]))
