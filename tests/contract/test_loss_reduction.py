"""Which losses of transformers and TRL are declared, one row of the table each, and what a script's own loss is."""

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.helpers.tiny import build_tiny, preference_rows
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.step.loss import LossReduction, find_reduction

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
BERT = BertConfig(num_labels=3, **SIZES)
SETTINGS = {"use_cpu": True, "report_to": [], "per_device_train_batch_size": 2}
LABELLED = [{"input_ids": [1, 2], "labels": i % 3} for i in range(4)]
UNKNOWN = LossReduction("auto")
TOKEN_SUM = LossReduction("token_sum", "sum")


class OwnModel(LlamaForCausalLM):
    """A model that a script wrote: its loss may do anything."""


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


def llama(kind=LlamaForCausalLM):
    return kind(LlamaConfig(num_key_value_heads=2, **SIZES))


def tiny(tmp_path):
    path = build_tiny(tmp_path / "model", hidden_size=16, num_layers=1, vocab_size=400)
    return {
        "model": AutoModelForCausalLM.from_pretrained(path),
        "processing_class": AutoTokenizer.from_pretrained(path),
    }


def found(tmp_path, model, kind=Trainer, asked="auto", **settings):
    args = TrainingArguments(str(tmp_path), **SETTINGS, **settings)
    trainer = kind(model=model, args=args, train_dataset=LABELLED, data_collator=default_data_collator)
    return find_reduction(trainer, asked)


@pytest.mark.parametrize(
    ("model", "kind", "expected"),
    [
        (llama, Trainer, TOKEN_SUM),
        (llama, OwnLoss, UNKNOWN),
        (llama, OwnStep, UNKNOWN),
        (lambda: llama(OwnModel), Trainer, UNKNOWN),
        # Rows of a classifier count by their labels.
        (lambda: BertForSequenceClassification(BERT), Trainer, LossReduction("row_mean", "tokens")),
        # It is handed the step's count and takes no notice.
        (lambda: BertForMaskedLM(BERT), Trainer, UNKNOWN),
        (lambda: T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1)), Trainer, UNKNOWN),
        (
            lambda: MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, output_router_logits=True, **SIZES)),
            Trainer,
            UNKNOWN,
        ),
    ],
)
def test_loss_is_known_by_its_class_alone(tmp_path, model, kind, expected):
    assert found(tmp_path, model(), kind) == expected


def test_step_of_a_library_beside_a_loss_that_it_does_not_call_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(OwnStep, "__module__", "trl.experimental.online_dpo")
    assert found(tmp_path, llama(), OwnStep) == UNKNOWN


def test_label_smoothing_is_another_loss(tmp_path):
    assert found(tmp_path, llama(), label_smoothing_factor=0.1) == UNKNOWN


@pytest.mark.parametrize(("loss_type", "kind"), [("sigmoid", "row_mean"), ("ipo", "row_mean"), ("aot", "auto")])
def test_preference_losses_are_means_of_pairs_unless_they_sort_them(tmp_path, loss_type, kind):
    args = DPOConfig(str(tmp_path), **SETTINGS, bf16=False, loss_type=[loss_type])
    trainer = DPOTrainer(train_dataset=Dataset.from_list(preference_rows(8)), args=args, **tiny(tmp_path))
    assert find_reduction(trainer).kind == kind


def test_fine_tuning_of_trl_is_a_sum_over_the_steps_tokens(tmp_path):
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4)
    args = SFTConfig(str(tmp_path), **SETTINGS, bf16=False)
    trainer = SFTTrainer(train_dataset=rows, args=args, **tiny(tmp_path))
    assert find_reduction(trainer) == TOKEN_SUM


def test_what_the_user_says_counts(tmp_path):
    assert found(tmp_path, llama(), OwnLoss, asked="whole") == LossReduction("whole")
    assert found(tmp_path, llama(), OwnLoss, asked="row_mean") == LossReduction("row_mean")
    with pytest.raises(ConfigError, match=r"loss_reduction='token_sum', but .* gets no num_items_in_batch"):
        found(tmp_path, NoCount(), asked="token_sum")


def test_micro_batch_that_lacks_what_is_counted_says_what_is_wrong():
    with pytest.raises(SetupError, match=r'given by "sum of weights".*weights is one number of float32') as info:
        LossReduction("auto", "sum of weights").count({"labels": torch.ones(2, 3), "weights": torch.tensor(1.0)})
    assert "num_items_in_batch" in info.value.hint


class NoCount(BertForSequenceClassification):
    def __init__(self):
        super().__init__(BERT)

    def forward(self, input_ids=None, labels=None):
        return super().forward(input_ids=input_ids, labels=labels)
