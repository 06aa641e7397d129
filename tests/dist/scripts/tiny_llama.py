"""A tiny Llama and ragged rows for the scripts beside this file. They import it behind the line, as users do."""

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(*, vocab_size=64, hidden_size=32, num_layers=2, **config):
    """With new weights, drawn from torch's random numbers."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            **config,
        )
    )


class RaggedRows(torch.utils.data.Dataset):
    """Rows of 5 to 39 tokens, the same for the same seed."""

    def __init__(self, num_rows, *, seed=0, vocab_size=64):
        draw = random.Random(seed)
        self.rows = [[draw.randrange(1, vocab_size) for _ in range(draw.randrange(5, 40))] for _ in range(num_rows)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def collate(rows):
    """Pads with zeros, which have no label."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def collate_end_to_end(rows):
    """Rows without padding, one after the other; none has a label where it begins."""
    ids = torch.tensor([[i for row in rows for i in row["input_ids"]]])
    position = torch.tensor([[i for row in rows for i in range(len(row["input_ids"]))]])
    return {"input_ids": ids, "position_ids": position, "labels": ids.masked_fill(position == 0, -100)}
