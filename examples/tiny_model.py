"""A tiny random Llama, its tokenizer and texts, made on the spot: the examples download nothing."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics as python_help

BOS, EOS, PAD = "<|begin_of_text|>", "<|eot_id|>", "<|pad|>"
HEADER, END_HEADER = "<|start_header_id|>", "<|end_header_id|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, HEADER, END_HEADER]
# Llama 3's format, so that scripts which expect it find its markers.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    f"{HEADER}{{{{ message['role'] }}}}{END_HEADER}\n\n{{{{ message['content'] | trim }}}}{EOS}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{HEADER}assistant{END_HEADER}\n\n{{% endif %}}"
)


def build_tiny(
    directory: str | os.PathLike[str],
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    vocab_size: int = 1500,
    texts: Iterable[str] = python_help.values(),
    seed: int = 0,
) -> str:
    """Makes a Llama with random fp32 weights, and a tokenizer from `texts`; returns the folder. Keeps an existing one.

    Several processes may call it at once: each builds in a folder of its own, and the first rename wins. It writes the
    files itself, because `save_pretrained` is the business of rank 0 alone where the plugin is on.
    """
    directory = Path(directory)
    if (directory / "config.json").exists():
        return str(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}_"))
    try:
        _write_tokenizer(draft, vocab_size, texts)
        _write_model(draft, hidden_size, num_layers, vocab_size, seed)
        draft.rename(directory)
    except OSError:
        if not (directory / "config.json").exists():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return str(directory)


def topics(n: int, *, min_words: int = 8, max_words: int = 160, seed: int = 0) -> list[str]:
    """`n` pieces of Python's own help texts. Their lengths are ragged: few are long, as in real data sets."""
    rng = random.Random(seed)
    # Without the underlining of headings.
    words = [[word for word in text.split() if word.strip("=-*^")] for text in python_help.values()]
    words = [w for w in words if len(w) >= max_words]
    pieces = []
    for _ in range(n):
        source = rng.choice(words)
        length = round(math.exp(rng.uniform(math.log(min_words), math.log(max_words))))
        start = rng.randrange(len(source) - length + 1)
        pieces.append(" ".join(source[start : start + length]))
    return pieces


def counting(start: int, length: int) -> str:
    """Numbers from `start` on: "Count: 98 99 0 1". 0 follows 99."""
    return " ".join(["Count:", *(str((start + i) % 100) for i in range(length))])


def counts(n: int, *, min_length: int = 8, max_length: int = 200, seed: int = 0) -> list[str]:
    """`n` texts of `counting`, with random starts. Their lengths are ragged: few are long, as in real data sets."""
    rng = random.Random(seed)
    bounds = math.log(min_length), math.log(max_length)
    return [counting(rng.randrange(100), round(math.exp(rng.uniform(*bounds)))) for _ in range(n)]


def _write_tokenizer(directory: Path, vocab_size: int, texts: Iterable[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))])
    bpe.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _write_model(directory: Path, hidden_size: int, num_layers: int, vocab_size: int, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        dtype="float32",
    )
    # The caller's own random numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    config.to_json_file(directory / "config.json")
