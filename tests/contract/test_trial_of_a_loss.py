"""What a trial of the loss keeps and puts back, on the real Trainer."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, Trainer, TrainingArguments

from unsloth_multigpu.step.snapshot import kept_training_state


class Counts(dict):  # type: ignore[type-arg]
    """A container of the script's own."""


COUNTS = Counts(calls=0, by_step=[[0]])
# In transformers 4 the Trainer's own loss names one like it.
TABLE = OrderedDict(llama="LlamaForCausalLM")
TABLE.filled_by = MODEL_FOR_CAUSAL_LM_MAPPING  # type: ignore[attr-defined]


class OwnLoss(Trainer):
    """Its loss counts in a variable of the module, and names a table of transformers."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        COUNTS["calls"] += 1
        COUNTS["by_step"][0].append(len(TABLE))
        self.is_causal = type(model) in MODEL_FOR_CAUSAL_LM_MAPPING
        return model(inputs["x"]).sum()


def test_containers_of_the_script_are_put_back_and_tables_of_libraries_left_alone(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = OwnLoss(model=torch.nn.Linear(2, 2), args=arguments)
    num_loaded = len(MODEL_FOR_CAUSAL_LM_MAPPING._modules)
    with kept_training_state(trainer):
        trainer.compute_loss(trainer.model, {"x": torch.ones(1, 2)})
        assert COUNTS == {"calls": 1, "by_step": [[0, 1]]}
        assert trainer.is_causal is False
    assert COUNTS == {"calls": 0, "by_step": [[0]]}
    assert not hasattr(trainer, "is_causal")
    # Such a table imports each model that is looked up in it.
    assert len(MODEL_FOR_CAUSAL_LM_MAPPING._modules) == num_loaded
