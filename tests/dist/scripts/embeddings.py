"""Trains a tiny model of sentence-transformers by several losses: the last batch and the last step are incomplete.

Usage: embeddings.py MODEL_FOLDER OUT LOSS...
"""

import sys

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import torch
from common import arguments, logged, write_facts
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

LOSSES = {
    # Its trainer learns its batch only before it trains, as SetFit's does: one row, which ranks could not share.
    "cosine": (losses.CosineSimilarityLoss, 1),
    "ranking": (losses.MultipleNegativesRankingLoss, 1),
    # As a script for torchrun has it: whole micro-batches, of which one rank alone has each, gather nothing.
    "ranking_whole": (lambda model: losses.MultipleNegativesRankingLoss(model, gather_across_devices=True), 2),
    "nested": (lambda m: losses.MatryoshkaLoss(m, losses.MultipleNegativesSymmetricRankingLoss(m), [8, 4]), 1),
    "cached": (lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2), 1),
    # It has a classifier of its own, which the model does not have.
    "softmax": (lambda m: losses.SoftmaxLoss(m, m.get_sentence_embedding_dimension(), num_labels=3), 2),
    "cross_encoder": (BinaryCrossEntropyLoss, 1),
}
model_folder, out, names = sys.argv[1], sys.argv[2], sys.argv[3:]
rows = [
    {"first": f"one word {i} " * (i % 5 + 1), "second": f"{i} " * (i % 3 + 1), "score": i % 3 / 2, "label": i % 3}
    for i in range(27)
]
TARGETS = {"cosine": ["score"], "cross_encoder": ["score"], "softmax": ["label"]}


def build_embedder():
    words = models.Transformer(model_folder, max_seq_length=32)
    words.tokenizer.pad_token = words.tokenizer.eos_token
    return SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())], device="cpu")


def build_cross_encoder():
    """A BERT without dropout, whose draws ranks would have anew."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=len(tokenizer), num_labels=1, **sizes, **dropout)
    BertForSequenceClassification(config).save_pretrained("bert")
    tokenizer.save_pretrained("bert")
    return CrossEncoder("bert", num_labels=1, max_length=32, device="cpu")


def train(name):
    make_loss, num_accumulated = LOSSES[name]
    data = Dataset.from_list(rows).select_columns(["first", "second", *TARGETS.get(name, [])])
    torch.manual_seed(0)
    is_cross = name == "cross_encoder"
    model = build_cross_encoder() if is_cross else build_embedder()
    make_trainer = CrossEncoderTrainer if is_cross else SentenceTransformerTrainer
    make_arguments = CrossEncoderTrainingArguments if is_cross else SentenceTransformerTrainingArguments
    batch_size = 8 // num_accumulated
    trainer = make_trainer(
        model=model,
        args=arguments(
            *("trained", 1 if name == "cosine" else batch_size, num_accumulated, make_arguments),
            per_device_eval_batch_size=4,
            eval_strategy="epoch",
            num_train_epochs=1,
            learning_rate=1e-3,
            # AdamW would train to the same weights with gradients of another scale.
            optim="sgd" if name == "softmax" else "adamw_torch",
        ),
        train_dataset=data,
        eval_dataset=data.select(range(9)),
        loss=make_loss(model),
    )
    trainer.args.per_device_train_batch_size = batch_size
    trainer.train()
    own = [p.tolist() for p in trainer.loss.classifier.parameters()] if name == "softmax" else []
    evaluated = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    return {**logged(trainer, "grad_norm", "learning_rate"), "eval_loss": evaluated, "own": own}


write_facts(out, {name: train(name) for name in names})
