"""A model of sentence embeddings, trained by its in-batch negatives: every GPU, or 2 CPU ranks where there is none.

python examples/embeddings.py
"""

import torch

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=torch.accelerator.device_count() or 2)

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from tiny_model import build_tiny, topics

# With a network: SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2")
model = SentenceTransformer(build_tiny("outputs/embeddings/tiny_model"))

# The second half of a text is to be found by its first half, among the halves of all others.
halves = [text.split() for text in topics(320, min_words=16, max_words=60)]
pairs = [{"anchor": " ".join(text[: len(text) // 2]), "positive": " ".join(text[len(text) // 2 :])} for text in halves]


def share_found() -> float:
    """Part of 64 texts, which are not trained on, whose second half is nearest to the first."""
    first, second = (model.encode([pair[name] for pair in pairs[256:]]) for name in ("anchor", "positive"))
    nearest = model.similarity(first, second).argmax(dim=1)
    return float((nearest == torch.arange(64, device=nearest.device)).float().mean())


before = share_found()
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="outputs/embeddings",
        per_device_train_batch_size=32,
        num_train_epochs=4,
        learning_rate=3e-3,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_list(pairs[:256]),
    loss=losses.MultipleNegativesRankingLoss(model),
)
trainer.train()
print(f"{trainer.args.world_size} ranks. Texts found by their first half: {before:.0%} before, {share_found():.0%} now")
