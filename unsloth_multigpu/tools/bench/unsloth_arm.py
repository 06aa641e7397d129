"""`--library unsloth`: a benchmark with FastLanguageModel and SFTTrainer, as Unsloth's users write it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.tools.bench.bench_option import UNSLOTH, BenchOptions


@contextlib.contextmanager
def made_model(options: BenchOptions) -> Iterator[BenchOptions]:
    """Creates the model that Unsloth loads, and removes it at the end. Yields the options with its folder.

    Raises:
        SetupError: Unsloth is not installed, or does not support the options on this machine.
    """
    if options.library != UNSLOTH:
        yield options
        return
    if importlib.util.find_spec("unsloth") is None:
        raise SetupError("--library unsloth, but Unsloth is not installed.", hint="pip install unsloth")
    if options.device == "cpu" and options.padding_free:
        raise SetupError(
            "--padding-free, but Unsloth's CPU backend pads all rows.", hint="Leave --padding-free out, or use a GPU."
        )
    with tempfile.TemporaryDirectory(prefix="unsloth_multigpu_bench_") as root:
        folder = Path(root, "model")
        _write_model(options, folder)
        yield dataclasses.replace(options, model_folder=str(folder))


def _write_model(options: BenchOptions, folder: Path) -> None:
    """Saves the model of `bench_worker.make_model`, without an adapter, and a tokenizer with its vocabulary size."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from unsloth_multigpu.tools.bench.bench_worker import make_model

    max_length = max(map(len, options.rows()))
    model = make_model(dataclasses.replace(options, train="full"), max_length)
    is_frozen_bf16 = options.train == "lora" and options.dtype == "bf16"
    model.to(torch.bfloat16 if is_frozen_bf16 else torch.float32).save_pretrained(folder)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*names.values(), *(f"w{number}" for number in range(len(names), options.model_shape[2]))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=names["unk_token"]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="right", model_max_length=max_length, **names
    ).save_pretrained(folder)


def load_model(options: BenchOptions, max_length: int, lora: Mapping[str, Any]) -> tuple[Any, Any]:
    """Loads model and tokenizer by Unsloth.

    Args:
        lora: Options of the adapter that Unsloth's `get_peft_model` and `LoraConfig` have in common.
    """
    import torch
    from unsloth import FastLanguageModel

    checkpointing = UNSLOTH if options.gradient_checkpointing else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model_folder,
        max_seq_length=max_length,
        dtype=torch.bfloat16 if options.dtype == "bf16" else torch.float32,
        load_in_4bit=options.four_bit,
        full_finetuning=options.train == "full",
        use_gradient_checkpointing=checkpointing,
        **({"device_map": "cpu"} if options.device == "cpu" else {}),
    )
    if options.train == "lora":
        model = FastLanguageModel.get_peft_model(
            model, use_gradient_checkpointing=checkpointing, random_state=options.seed, **lora
        )
    return model, tokenizer


def make_trainer(
    model: Any,
    tokenizer: Any,
    values: Mapping[str, Any],
    options: BenchOptions,
    max_length: int,
    rows: Any,
    callbacks: Sequence[Any],
) -> Any:
    """Creates TRL's SFTTrainer, which Unsloth has replaced, with its own collator.

    Args:
        values: Arguments of `TrainingArguments`.
        rows: A data set of tokens.

    Raises:
        SetupError: Unsloth has overridden padding_free.
    """
    from trl import SFTConfig, SFTTrainer

    # Unsloth's checkpointing was turned on when the model was loaded.
    values = {name: value for name, value in values.items() if not name.startswith("gradient_checkpointing")}
    if not options.gradient_checkpointing:
        values["gradient_checkpointing"] = False  # SFTTrainer's default is True.
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rows,
        callbacks=list(callbacks),
        args=SFTConfig(max_length=max_length, padding_free=options.padding_free, packing=False, **values),
    )
    if bool(trainer.args.padding_free) != options.padding_free:
        raise SetupError(
            f"padding_free={options.padding_free} was set, but Unsloth trains with {trainer.args.padding_free}.",
            hint="Leave --padding-free out." if options.padding_free else "Set --padding-free.",
        )
    return trainer
