"""The training script of every arm of a benchmark: a plain Trainer, in some arms after `enable_multi_gpu()`.

With `--library unsloth`: FastLanguageModel and SFTTrainer, as Unsloth's users write it. `Meter` measures every arm:
compute time and samples of each step of a rank. The compute time of a micro-batch ends with the gradient of
the first trainable parameter, which is the last one of a backward pass. After that a rank waits for the others. Nothing
is read from a GPU before the end.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unsloth_multigpu.accelerator import CPU_BACKEND
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.waits import Lap, moment
from unsloth_multigpu.recorders.fingerprint import fingerprints
from unsloth_multigpu.tools.bench.arm import ARMS, HEAD_SIZE, UNSLOTH, Arm, BenchOptions
from unsloth_multigpu.wire.process import read_peak_bytes

# transformers' BatchRebalanceSampler always uses this seed; so do the other arms, so that all see the same order.
_ORDER_SEED = 42
_LORA: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def main(settings_file: str) -> None:
    """Trains with the settings in a file, and writes `rank_R.json` beside it."""
    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    arm, options = ARMS[settings["arm"]], BenchOptions(**settings["options"])
    if arm.line is not None:
        from unsloth_multigpu.plugin import enable_multi_gpu

        # `Meter` would also count the samples of the comparison.
        given = {"check_first_step": "off", **arm.line, "device": options.device}
        enable_multi_gpu(num_gpus=arm.num_devices(options), **given)
    rank = int(os.environ.get("RANK", "0"))
    record = _train(arm, options, rank)
    file = Path(settings_file).with_name(f"rank_{rank}.json")
    file.write_text(json.dumps({"rank": rank, **record}), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()  # At the interpreter's end its threads may abort the process.


def _train(arm: Arm, options: BenchOptions, rank: int) -> dict[str, Any]:
    if options.library == UNSLOTH:
        import unsloth  # noqa: F401  # First, as in users' scripts.
    from datasets import Dataset
    from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

    from unsloth_multigpu.plugin import get_multi_gpu_status

    is_cuda, rows = options.device == "cuda", options.rows()
    model, tokenizer = load_model(options) if options.library == UNSLOTH else (make_model(options), None)
    meter = Meter(model, is_cuda=is_cuda)

    class MarkSteps(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            meter.mark_begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.mark_step()

    # With lengths, so that samplers need not read the rows.
    data = Dataset.from_dict({"input_ids": rows, "length": list(map(len, rows))})
    values = training_values(arm, options)
    if options.library == UNSLOTH:
        trainer = make_trainer(model, tokenizer, values, options, data)
    else:
        collator = DataCollatorWithFlattening() if options.padding_free else collate
        trainer = Trainer(model, TrainingArguments(**values), data_collator=collator, train_dataset=data)
    trainer.add_callback(MarkSteps())
    trainer.train()
    history, report = trainer.state.log_history, get_multi_gpu_status().report
    sent_bytes = 0 if not arm.uses_all_devices else None if report is None else report.ranks[rank].sent_bytes
    return {
        "steps": meter.steps(),
        "gradient_norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry and arm.is_synchronous],
        "peak_bytes": peak_bytes(is_cuda),
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "sent_bytes": sent_bytes,
        "planner": {} if report is None else dict(report.planner),
    }


def make_model(options: BenchOptions) -> Any:
    """Creates a Llama with random weights from the seed, with an adapter if `train` is "lora"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed)
    hidden_size, num_layers, vocab_size = options.model_shape
    num_heads = hidden_size // HEAD_SIZE
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 4 if num_heads % 4 == 0 else num_heads,
            max_position_embeddings=options.max_length,
            use_cache=False,
        )
    )
    if options.train == "lora":
        from peft import LoraConfig, get_peft_model

        model = model.to(torch.bfloat16 if options.dtype == "bf16" else torch.float32)
        model = get_peft_model(model, LoraConfig(**_LORA))
    return model


def training_values(arm: Arm, options: BenchOptions) -> dict[str, Any]:
    """Returns the arguments of `TrainingArguments`."""
    return {
        "output_dir": "output",
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": arm.num_accumulated(options),
        "optim": options.optim,
        "bf16": options.dtype == "bf16",
        "gradient_checkpointing": options.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if options.gradient_checkpointing else None,
        "use_cpu": options.device == "cpu",
        "ddp_backend": CPU_BACKEND if options.is_gpu_shared else None,
        "seed": options.seed,
        "data_seed": _ORDER_SEED,
        # Logging gathers the loss from all ranks: ranks that step independently would wait for each other.
        "logging_strategy": "steps" if arm.is_synchronous else "no",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "num_train_epochs": 1,
        "learning_rate": 1e-5,
        **arm.training,
    }


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads to the longest row: input_ids, attention_mask and labels, each rows x longest."""
    from torch.nn.utils.rnn import pad_sequence

    each = [torch.tensor(row["input_ids"]) for row in rows]
    ids = pad_sequence(each, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in each], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def make_folder(options: BenchOptions, root: Path) -> BenchOptions:
    """Creates the model that Unsloth loads, in a folder of `root`. Returns the options with that folder.

    Raises SetupError if Unsloth is not installed, or does not support the options on this machine.
    """
    if options.library != UNSLOTH:
        return options
    if importlib.util.find_spec("unsloth") is None:
        raise SetupError("--library unsloth, but Unsloth is not installed.", hint="pip install unsloth")
    if options.device == "cpu" and options.padding_free:
        raise SetupError(
            "--padding-free, but Unsloth's CPU backend pads all rows.", hint="Leave --padding-free out, or use a GPU."
        )
    _write_model(options, root / "model")
    return dataclasses.replace(options, model_folder=str(root / "model"))


def _write_model(options: BenchOptions, folder: Path) -> None:
    """Saves the model of `make_model`, without an adapter, and a tokenizer with its vocabulary size."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = make_model(dataclasses.replace(options, train="full"))
    is_frozen_bf16 = options.train == "lora" and options.dtype == "bf16"
    model.to(torch.bfloat16 if is_frozen_bf16 else torch.float32).save_pretrained(folder)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*names.values(), *(f"w{number}" for number in range(len(names), options.model_shape[2]))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=names["unk_token"]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="right", model_max_length=options.max_length, **names
    ).save_pretrained(folder)


def load_model(options: BenchOptions) -> tuple[Any, Any]:
    """Loads model and tokenizer by Unsloth."""
    from unsloth import FastLanguageModel

    checkpointing = UNSLOTH if options.gradient_checkpointing else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model_folder,
        max_seq_length=options.max_length,
        dtype=torch.bfloat16 if options.dtype == "bf16" else torch.float32,
        load_in_4bit=options.four_bit,
        full_finetuning=options.train == "full",
        use_gradient_checkpointing=checkpointing,
        **({"device_map": "cpu"} if options.device == "cpu" else {}),
    )
    if options.train == "lora":
        model = FastLanguageModel.get_peft_model(
            model, use_gradient_checkpointing=checkpointing, random_state=options.seed, **_LORA
        )
    return model, tokenizer


def make_trainer(model: Any, tokenizer: Any, values: Mapping[str, Any], options: BenchOptions, rows: Any) -> Any:
    """Creates TRL's SFTTrainer, which Unsloth has replaced, with its own collator.

    `values` are those of `training_values`. Raises SetupError if Unsloth has overridden padding_free.
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
        args=SFTConfig(max_length=options.max_length, padding_free=options.padding_free, packing=False, **values),
    )
    if bool(trainer.args.padding_free) != options.padding_free:
        raise SetupError(
            f"padding_free={options.padding_free} was set, but Unsloth trains with {trainer.args.padding_free}.",
            hint="Leave --padding-free out." if options.padding_free else "Set --padding-free.",
        )
    return trainer


# Wall time and CPU time in seconds, and the number of micro-batches so far.
_Mark = tuple[float, float, int]

# Inputs of a forward pass: `input_ids`, with `position_ids` for padding-free batches, else `attention_mask`. Then for
# each row whether it is a sample; False = the filler of a rank without samples.
_Inputs = tuple[dict[str, torch.Tensor], torch.Tensor]


class Meter:
    """Measures one model on a GPU or the CPU by hooks. Created before any other hook is registered."""

    def __init__(self, model: torch.nn.Module, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._micro_batches: list[tuple[_Inputs, Lap]] = []
        self._pending: tuple[_Inputs, Any] | None = None
        self._steps: list[tuple[_Mark, _Mark]] = []
        self._last = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._last.register_post_accumulate_grad_hook(self._after_backward)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def mark_begin(self) -> None:
        """Called at the start of an epoch: the time before it belongs to no step."""
        self._begin = self._mark()

    def mark_step(self) -> None:
        """Called at the end of a step."""
        end = self._mark()
        self._steps.append((self._begin, end))
        self._begin = end

    def steps(self) -> list[dict[str, Any]]:
        """Returns one record per step, see `bench_result`."""
        return [
            {
                "wall_s": after[0] - before[0],
                "cpu_s": after[1] - before[1],
                **_computed(self._micro_batches[before[2] : after[2]]),
            }
            for before, after in self._steps
        ]

    def _mark(self) -> _Mark:
        if self._is_cuda:
            torch.cuda.synchronize()  # Most arms synchronize in each step in any case, when they log the loss.
        return time.perf_counter(), time.process_time(), len(self._micro_batches)

    def _before_forward(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._pending = None
        if not (model.training and torch.is_grad_enabled()):
            return  # Not a training step.
        more = "position_ids" if "position_ids" in kwargs else "attention_mask"
        inputs = {name: kwargs[name].clone() for name in ("input_ids", more)}
        # Not of the inputs' device: the legacy path uses several, and a lap is measured on one.
        self._pending = (inputs, (kwargs["labels"] != -100).any(dim=1)), moment(self._last.device)

    def _after_backward(self, parameter: Any) -> None:
        if self._pending is not None:
            batch, begin = self._pending
            self._micro_batches.append((batch, Lap(begin, moment(parameter.device))))
            self._pending = None


def _computed(micro_batches: list[tuple[_Inputs, Lap]]) -> dict[str, Any]:
    """Returns compute time, sizes and samples of micro-batches, see `bench_result`."""
    samples: list[str] = []
    sizes = []
    for (inputs, is_sample), _ in micro_batches:
        kept = {name: value[is_sample] for name, value in inputs.items()}
        samples += fingerprints(kept).elements()
        tokens = kept["attention_mask"].sum() if "attention_mask" in kept else kept["input_ids"].numel()
        sizes.append([*inputs["input_ids"].shape, int(tokens)])
    compute_s = sum(lap.seconds() for _, lap in micro_batches)
    return {"compute_s": compute_s, "micro_batches": sizes, "samples": samples}


def peak_bytes(is_cuda: bool) -> int:
    """Returns the peak memory of this process: torch's allocations summed over GPUs, on the CPU resident memory."""
    if is_cuda:
        return sum(int(torch.cuda.max_memory_allocated(i)) for i in range(torch.cuda.device_count()))
    return read_peak_bytes()


if __name__ == "__main__":
    main(sys.argv[1])
