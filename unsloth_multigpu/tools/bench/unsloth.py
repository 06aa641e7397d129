"""Unsloth in a benchmark: `--library unsloth` trains with FastLanguageModel and SFTTrainer, as its users do.

Unsloth loads models from a folder. The benchmark makes one before the arms run, in a process of its own:
`python -m unsloth_multigpu.tools.bench.unsloth settings.json` writes the model next to the file of settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.tools.bench.option import UNSLOTH, BenchOptions

_RESULT = "model.json"
_MODEL = "model"


@contextlib.contextmanager
def made_model(options: BenchOptions) -> Iterator[BenchOptions]:
    """The options with the folder of the model that they ask for, which is removed behind the benchmark.

    Raises:
        SetupError: Unsloth is not installed, or cannot do it here.
        LaunchError: The model could not be made.
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
    from unsloth_multigpu.tools.bench.arm import ARMS, REFERENCE, arm_environment
    from unsloth_multigpu.tools.bench.run import Pace, run_worker

    with tempfile.TemporaryDirectory(prefix="unsloth_multigpu_bench_") as root:
        with Pace(["model"], 1) as pace, pace.told(UNSLOTH, "model"):
            run_worker(
                "that makes the model",
                [sys.executable, "-m", "unsloth_multigpu.tools.bench.unsloth"],
                {"options": dataclasses.asdict(options)},
                Path(root),
                arm_environment(ARMS[REFERENCE], options, Path(root), os.environ),
                options.timeout_s,
                results=[_RESULT],
                hint="See whether there is room on the disk for the model.",
            )
        yield dataclasses.replace(options, model_folder=str(Path(root, _MODEL)))


def main(settings_file: str) -> None:
    """Writes the model and its tokenizer."""
    from unsloth_multigpu.tools.bench.data import make_rows

    file = Path(settings_file)
    options = BenchOptions(**json.loads(file.read_text(encoding="utf-8"))["options"])
    write_model(options, max(map(len, make_rows(options))), file.with_name(_MODEL))
    file.with_name(_RESULT).write_text(json.dumps({}), encoding="utf-8")


def write_model(options: BenchOptions, max_length: int, folder: Path) -> None:
    """Writes the model of `worker.make_model`, without an adapter, and a tokenizer of as many tokens."""
    import torch

    from unsloth_multigpu.tools.bench.worker import make_model

    model = make_model(dataclasses.replace(options, train="full"), max_length)
    is_frozen_bf16 = options.train == "lora" and options.dtype == "bf16"
    model.to(torch.bfloat16 if is_frozen_bf16 else torch.float32).save_pretrained(folder)
    _make_tokenizer(options.vocab_size, max_length).save_pretrained(folder)


def _make_tokenizer(vocab_size: int, max_length: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*names.values(), *(f"w{number}" for number in range(len(names), vocab_size))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=names["unk_token"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="right", model_max_length=max_length, **names
    )


def load_model(options: BenchOptions, max_length: int, lora: Mapping[str, Any]) -> tuple[Any, Any]:
    """Model and tokenizer as a user of Unsloth has them.

    Args:
        lora: Options of the adapter that `get_peft_model` of Unsloth and `LoraConfig` have in common.
    """
    import torch
    from unsloth import FastLanguageModel

    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    checkpointing = UNSLOTH if options.gradient_checkpointing else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model_folder,
        max_seq_length=max_length,
        dtype=dtype,
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
    """TRL's SFTTrainer, which Unsloth has replaced, with its own collator.

    Args:
        values: Of `TrainingArguments`.
        rows: A data set with tokens.

    Raises:
        SetupError: Unsloth has decided otherwise about padding.
    """
    from trl import SFTConfig, SFTTrainer

    # Unsloth's checkpointing was turned on at the model.
    values = {name: value for name, value in values.items() if not name.startswith("gradient_checkpointing")}
    if not options.gradient_checkpointing:
        values["gradient_checkpointing"] = False  # SFTTrainer's own default is to turn it on.
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rows,
        callbacks=list(callbacks),
        args=SFTConfig(
            max_length=max_length,
            padding_free=options.padding_free,
            packing=False,
            **values,
        ),
    )
    found = trainer.args.padding_free
    if bool(found) != options.padding_free:
        raise SetupError(
            f"padding_free={options.padding_free} was asked for, and Unsloth trains with {found}.",
            hint="Leave --padding-free out." if options.padding_free else "Give --padding-free.",
        )
    return trainer


if __name__ == "__main__":
    main(sys.argv[1])
