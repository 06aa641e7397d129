"""Models of texts and their Trainers, which several scripts beside this file have in common."""

import sys

import torch
from common import move_off_zero, new_classifier
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj", "up_proj"]}
HAS_UNSLOTH = "unsloth" in sys.modules


class Texts:
    """Trains the model in a folder, which has a tokenizer; `args` are keywords of a Trainer's arguments."""

    def __init__(self, folder):
        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(folder)

    def causal_lm(self, **options):
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, **options)

    def unsloth_lm(self, **options):
        from unsloth import FastLanguageModel

        options = {"max_seq_length": 128, "load_in_4bit": False, "dtype": torch.float32, **options}
        return FastLanguageModel.from_pretrained(self.folder, **options)[0]

    def lora(self):
        return move_off_zero(get_peft_model(self.causal_lm(), LoraConfig(**LORA)))

    def fast_lora(self):
        """By Unsloth, with checkpoints of activations."""
        if HAS_UNSLOTH:
            from unsloth import FastLanguageModel

            options = {"use_gradient_checkpointing": True, "random_state": 7}
            return move_off_zero(FastLanguageModel.get_peft_model(self.unsloth_lm(), **options, **LORA))
        # As in some of the environments that this package is tested in. The same adapter, by PEFT.
        model = get_peft_model(self.causal_lm(), LoraConfig(task_type="CAUSAL_LM", **LORA))
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return move_off_zero(model)

    def tokenized(self, texts):
        rows = Dataset.from_dict({"text": texts})
        return rows.map(
            lambda row: self.tokenizer(row["text"], truncation=True, max_length=64), remove_columns=["text"]
        )

    def plain(self, model, texts, args):
        collator = DataCollatorForLanguageModeling(self.tokenizer, mlm=False)
        rows = self.tokenized(texts)
        return Trainer(model=model, args=TrainingArguments(**args), train_dataset=rows, data_collator=collator)

    def classifier(self, texts, args):
        """Its loss is a mean over rows although the model takes loss arguments."""
        model, rows = new_classifier(self.folder, 3, self.tokenizer), self.tokenized(texts)
        rows = rows.add_column("labels", [len(t) % 3 for t in texts])
        collator = DataCollatorWithPadding(self.tokenizer)
        return Trainer(model=model, args=TrainingArguments(**args), train_dataset=rows, data_collator=collator)

    def sft(self, model, texts, args):
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(dataset_text_field="text", **{"max_length": 64, **args})
        rows = Dataset.from_dict({"text": texts})
        return SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=self.tokenizer)

    def dpo(self, model, texts, args):
        from trl import DPOConfig, DPOTrainer

        rows = Dataset.from_dict({"prompt": texts, "chosen": [t[::-1] for t in texts], "rejected": texts[::-1]})
        config = DPOConfig(max_length=96, **args)
        return DPOTrainer(model=model, args=config, train_dataset=rows, processing_class=self.tokenizer)
