"""The script of `plan --model`: a typical training of a model that is created from its configuration.

LoRA on all linear layers, or all weights; bf16, gradient checkpointing, micro-batches of one sample.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any


def main() -> None:
    """Creates the model and calls `train()`, where the forecast ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("lora", "bits", "tokens", "samples"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asked = parser.parse_args()

    from transformers import Trainer, TrainingArguments

    row = {"input_ids": [1] * asked.tokens, "labels": [1] * asked.tokens}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            bf16=True,
            gradient_checkpointing=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=asked.samples,
            report_to=[],
        )
        rows: Any = [row] * asked.samples
        Trainer(_model(asked.model, asked.lora, asked.bits), arguments, train_dataset=rows).train()


def _model(name: str, lora: int, bits: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if bits == 4:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    model = AutoModelForCausalLM.from_pretrained(name, **options)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM"))


if __name__ == "__main__":
    main()
