"""Mapped functions that do more than return rows. Usage: effects.py OUT"""

import collections
import json
import os
import random
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=None if "RANK" in os.environ else 2)

import datasets

rank = int(os.environ.get("RANK", "0"))
random.seed(5)
facts = {}
os.environ["CALLED"] = f"{sys.argv[1]}_called_{rank}"


def call():
    """Counts, where neither the hash of a function nor what it reaches has it."""
    with open(os.environ["CALLED"], "a") as file:
        file.write("x")


def num_calls():
    called = Path(os.environ["CALLED"])
    count = called.stat().st_size if called.exists() else 0
    called.unlink(missing_ok=True)
    return count


rows = [{"text": f"word{i % 5} word{i % 3}", "label": "abc"[i % 3]} for i in range(12)]
datasets.Dataset.from_list(rows).save_to_disk(f"{sys.argv[1]}_data")
stored = datasets.load_from_disk(f"{sys.argv[1]}_data")
memory = datasets.Dataset.from_list(rows)

counter = collections.Counter()
label2id = {}


class Vocabulary:
    def __init__(self):
        self.ids = {}

    def __call__(self, batch, indices):
        call()
        return {"ids": [[self.ids.setdefault(w, len(self.ids)) for w in text.split()] for text in batch["text"]]}

    def is_new(self, row):
        return self.ids.setdefault(row["label"], len(self.ids)) >= 0


def count(row):
    call()
    counter.update(row["text"].split())
    return {"label": label2id.setdefault(row["label"], len(label2id))}


for name, data in (("stored", stored), ("memory", memory)):
    counter.clear()
    label2id.clear()
    mapped = data.map(count)
    facts[name] = [dict(counter), dict(label2id), mapped["label"][:], mapped._fingerprint]
    again = data.map(count)
    facts[f"{name} again"] = [dict(counter), again["label"][:]]
    facts[f"{name} calls"] = num_calls()

vocabulary = Vocabulary()
mapped = stored.map(vocabulary, True, batched=True, batch_size=4)
facts["vocabulary"] = [vocabulary.ids, mapped["ids"][:], num_calls()]
facts["filter"] = [len(stored.filter(vocabulary.is_new)), dict(vocabulary.ids)]
both = datasets.DatasetDict(train=stored, test=memory)
seen = []
both = both.map(lambda row, kept: kept.append(row["label"]), fn_kwargs={"kept": seen})
facts["both"] = seen


def draw(row):
    call()
    return {"drawn": random.random()}


mapped = stored.map(draw)
facts["drawn"] = [mapped["drawn"][:], random.random(), num_calls()]


def pure(row):
    call()
    return {"length": len(row["text"]), "known": row["label"] in label2id}


mapped = stored.map(pure)
facts["pure"] = [mapped["length"][:], num_calls()]
Path(f"{sys.argv[1]}_{rank}.json").write_text(json.dumps(facts))
