"""Federated LoRA: ten clients, each with texts of its own, train one Unsloth adapter together.

    python examples/federated_lora.py                        # clients on every GPU; without one, 2 CPU slots
    python examples/federated_lora.py --clients 20 --rounds 5 --num-gpus 4 --batch-size 16
    python examples/federated_lora.py --strategy fedadam     # any strategy of Flower, by its name

Downloads nothing: the model is tiny and made on the spot. The texts are Python's own help. Each of its topics belongs
to one client, so that no two clients know the same: one has `string-methods`, another one `debugger`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import unsloth_multigpu as ump

OUTPUT = Path("outputs/federated_lora")
WORDS = 40  # Of one text.
MAX_TEXTS = 64  # Of one client.


def build_model():
    """The base model with a fresh adapter. Called once in each slot, which then keeps it over all rounds."""
    from unsloth import FastLanguageModel  # isort: skip  # Before transformers, which it changes.

    from tiny_model import build_tiny

    name = options.model or build_tiny(OUTPUT / "tiny_model", hidden_size=128)
    model, _ = FastLanguageModel.from_pretrained(name, max_seq_length=256, dtype=precision(), load_in_4bit=False)
    return FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, lora_dropout=0.0, random_state=3407)


def train_client(model, client):
    """One epoch over the client's texts. Everything is as in a script for one GPU."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    texts, _ = texts_of(client.client_id, client.num_clients)
    trainer = SFTTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(model.config._name_or_path),
        train_dataset=Dataset.from_dict({"text": texts}),
        args=SFTConfig(
            output_dir=str(OUTPUT / "trainer"),
            per_device_train_batch_size=client.config["batch-size"],
            gradient_accumulation_steps=1,
            num_train_epochs=1,
            max_length=256,
            learning_rate=client.config["learning-rate"],
            optim="adamw_torch",
            bf16=False,  # fp32 on a CPU; on a GPU Unsloth turns bf16 or fp16 on by itself.
            seed=client.seed,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    loss = trainer.train().training_loss
    return len(texts), {"loss": loss}


def evaluate_client(model, client):
    """The loss of the round's model on texts that this client did not train on."""
    from transformers import AutoTokenizer

    _, held_out = texts_of(client.client_id, client.num_clients)
    loss = mean_loss(model, AutoTokenizer.from_pretrained(model.config._name_or_path), held_out)
    return loss, len(held_out), {}


def texts_of(client_id: int, num_clients: int) -> tuple[list[str], list[str]]:
    """Texts of one client's topics: to train on, and every fifth one held out. Some clients have few."""
    names = sorted(topics)  # Neighbours in the alphabet are about the same thing.
    own = names[client_id * len(names) // num_clients : (client_id + 1) * len(names) // num_clients]
    words = [word for name in own for word in topics[name].split() if word.strip("=-*^")]
    texts = [" ".join(words[i : i + WORDS]) for i in range(0, len(words), WORDS)][: MAX_TEXTS * 5 // 4]
    return [text for i, text in enumerate(texts) if i % 5], texts[::5]


def mean_loss(model, tokenizer, texts: list[str]) -> float:
    """Of the next token, over all tokens of `texts`."""
    import torch

    loss, num_tokens = 0.0, 0
    model.eval()
    is_half = model.dtype != torch.float32
    with torch.no_grad(), torch.autocast(model.device.type, dtype=model.dtype if is_half else None, enabled=is_half):
        for i in range(0, len(texts), 16):
            batch = tokenizer(texts[i : i + 16], return_tensors="pt", padding=True, truncation=True, max_length=256)
            batch = batch.to(model.device)
            is_text = batch["attention_mask"].bool()
            labels = batch["input_ids"].masked_fill(~is_text, -100)
            num_labels = int(is_text[:, 1:].sum())
            loss += float(model(**batch, labels=labels).loss) * num_labels
            num_tokens += num_labels
    return loss / num_tokens


def main() -> None:
    settings = {"batch-size": options.batch_size, "learning-rate": 2e-4 if options.model else 5e-3}
    try:
        server = ump.create_multigpu_flower_server(
            "federated-lora",
            build_model,
            strategy=options.strategy,
            strategy_kwargs={"proximal_mu": 0.01} if options.strategy == "fedprox" else None,
            train_fn=train_client,
            evaluate_fn=evaluate_client,
            num_gpus=options.num_gpus or num_devices(),
            max_workers=options.max_workers,
            lora_aggregation=options.lora_aggregation,
        )
        with server:
            result = server.fit(num_clients=options.clients, num_rounds=options.rounds, config=settings)
            server.save(OUTPUT / "adapter")
    except ump.ConfigError as error:
        sys.exit(f"federated_lora.py: {error}")
    print(result.report)
    check(OUTPUT / "adapter")


def check(adapter: Path) -> None:
    """Loads what was saved, as the next script would, and compares it with the base model on all held-out texts."""
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(adapter), max_seq_length=256, dtype=precision(), load_in_4bit=False
    )
    held_out = [text for client_id in range(options.clients) for text in texts_of(client_id, options.clients)[1]]
    with model.disable_adapter():
        before = mean_loss(model, tokenizer, held_out)
    after = mean_loss(model, tokenizer, held_out)
    print(f"{adapter}, loss on {len(held_out)} held-out texts: {before:.4f} without it, {after:.4f} with it")
    if not after < before:
        sys.exit("The adapter has learnt nothing.")


def precision():
    """fp32 on a CPU; None lets Unsloth choose."""
    import torch

    return None if torch.accelerator.is_available() else torch.float32


def num_devices() -> int:
    import torch

    return torch.accelerator.device_count() or 2


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--model", help="Hugging Face name or folder [a tiny Llama, made on the spot]")
    parser.add_argument("--num-gpus", **number, help="GPUs to use [every GPU; without one, 2 CPU slots]")
    parser.add_argument("--clients", **number, default=10, help="clients of the federation [10]")
    parser.add_argument("--rounds", **number, default=3, help="rounds; all clients train in each [3]")
    parser.add_argument("--batch-size", **number, default=8, help="texts of an optimizer step of a client [8]")
    parser.add_argument("--max-workers", **number, help="clients that run at the same time [one per GPU or slot]")
    parser.add_argument("--strategy", default="fedavg", help="fedavg, fedprox, fedadam, fedyogi, krum, ... [fedavg]")
    parser.add_argument("--lora-aggregation", choices=["mean", "project"], default="mean", help="[mean]")
    options = parser.parse_args()
    for name, value in vars(options).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    if options.clients > len(topics):
        parser.error(f"--clients {options.clients}: Python's help has {len(topics)} topics, and each client needs one")
    return options


if __name__ == "__main__":
    options = parse_options()
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in ("torch.utils._pytree", "bitsandbytes"):  # About parts of them that are not used here.
        logging.getLogger(name).setLevel(logging.ERROR)
    main()
