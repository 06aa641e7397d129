"""Patches and methods that are steered while a Trainer trains, on the real trainers: there, and called as expected.

Each test of a patch is a fresh interpreter: one that lands at import can be seen once per process.
"""

from __future__ import annotations

import inspect
import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import need
from tests.helpers.log_probs import LogProbs
from tests.helpers.run import LIGHT, ROOT, run_well


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.tiny import build_tiny

    folder = tmp_path_factory.mktemp("model")
    build_tiny(folder)
    return folder


def made(kind: str, model_folder: Path, folder: Path) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "use_cpu": True}
    settings |= {"save_strategy": "steps", "save_steps": 1, "report_to": [], "disable_tqdm": True}
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = [f"{i} words and words" for i in range(8)]
    if kind == "Trainer":
        from transformers import Trainer, TrainingArguments

        rows: Any = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 8
        return Trainer(model=model, args=TrainingArguments(str(folder), **settings), train_dataset=rows)
    import trl

    columns = {"SFT": {"text": texts}, "DPO": {"prompt": texts, "chosen": texts, "rejected": texts[::-1]}}
    options = {"bf16": False, "gradient_checkpointing": False, **({"loss_type": "nll"} if kind == "SFT" else {})}
    config = getattr(trl, f"{kind}Config")(str(folder), max_length=32, **settings, **options)
    rows = Dataset.from_dict(columns[kind])
    return getattr(trl, f"{kind}Trainer")(model=model, args=config, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize("kind", ["Trainer", "SFT", "DPO"])
def test_methods_are_there_and_are_called_in_each_step_and_for_each_checkpoint(
    kind: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unsloth_multigpu.seam import SEAMS, steered, verify_calls, verify_seams

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", LogProbs)
    trainer = made(kind, model_folder, tmp_path)
    verify_seams(trainer)
    expected = {name: seam for name, seam in SEAMS.items() if seam.called}
    owners = {name: trainer if s.owner == "trainer" else getattr(trainer, s.owner) for name, s in expected.items()}
    with ExitStack() as stack:
        for name in expected:
            stack.enter_context(steered(owners[name], name, lambda call, *args, **kwargs: call(*args, **kwargs)))
        trainer.train()
        num_calls = {name: vars(owners[name])[name].num_calls for name in expected}
        verify_calls(trainer, "step")
        verify_calls(trainer, "step end")
        verify_calls(trainer, "save")
    in_each_micro_batch = {"training_step": 4, "compute_loss": 4}
    # The end of an epoch asks for a log, too.
    assert num_calls == {**dict.fromkeys(expected, 2), **in_each_micro_batch, "_maybe_log_save_evaluate": 3}


def test_fake_trainer_has_what_the_real_one_has(model_folder: Path, tmp_path: Path) -> None:
    from tests.helpers.trainer import OWN_NAMES, FakeTrainer

    real, fake = made("Trainer", model_folder, tmp_path), FakeTrainer()
    owners = {
        "": (fake, real),
        "args": (fake.args, real.args),
        "state": (fake.state, real.state),
        "control": (fake.control, real.control),
        "accelerator": (fake.accelerator, real.accelerator),
        "callback_handler": (fake.callback_handler, real.callback_handler),
    }
    for path, (made_up, own) in owners.items():
        names = {*vars(made_up), *(n for n in vars(type(made_up)) if not n.startswith("__"))} - set(OWN_NAMES)
        names = set(vars(made_up)) if isinstance(made_up, SimpleNamespace) else names
        for name in names:
            # Some are set where a training begins.
            is_set_late = f"self.{name} = " in inspect.getsource(inspect.getmodule(type(real)))
            assert hasattr(own, name) or is_set_late, f"{path}.{name}"
            if inspect.isfunction(ours := getattr(type(made_up), name, None)):
                theirs = inspect.signature(getattr(own, name)).parameters
                mine = [n for n in inspect.signature(ours).parameters if n != "self"]
                assert mine == list(theirs)[: len(mine)], f"{path}.{name}"


def test_every_method_that_stands_on_a_trainer_is_in_the_table() -> None:
    from unsloth_multigpu.seam import SEAMS

    frozen = json.loads((ROOT / "tests" / "dist" / "onion.json").read_text())
    found = {name for training in frozen.values() for name in training["seams"]}
    assert found
    assert found <= {f"{seam.owner}.{seam.name}" for seam in SEAMS.values()}


PRELUDE = """
import inspect, sys
from unsloth_multigpu.errors import PatchError
from unsloth_multigpu.patching import Patch, PatchRegistry

calls = []

def wrap(original, self, *args, **kwargs):
    calls.append("ours")
    return "ours"

def registry(**fields):
    return PatchRegistry([Patch("transformers.trainer:Trainer.train", "transformers>=4.57,<6", wrap, "test", **fields)])

patches = registry(needs=("self", "resume_from_checkpoint"))

def check_landed():
    from transformers import Trainer
    assert set(patches.states().values()) == {"landed"}, patches.states()
    patches.verify()
    assert Trainer.train.__name__ == "train"
    assert "resume_from_checkpoint" in inspect.signature(Trainer.train).parameters
    assert "def train(" in inspect.getsource(Trainer.train)
    assert Trainer.train(Trainer.__new__(Trainer)) == "ours"
"""


def run(script: str) -> None:
    run_well(["-c", PRELUDE + script], ROOT, LIGHT)


def test_trainer_patch_waits_for_the_import_and_leaves_the_class_as_it_was() -> None:
    run("""
patches.apply()
assert "transformers" not in sys.modules and "torch" not in sys.modules
from transformers import Trainer
check_landed()
raw = Trainer.train.__wrapped__
patched = dict(vars(Trainer))
patches.undo()
assert vars(Trainer)["train"] is raw and list(vars(Trainer)) == list(patched)
assert all(vars(Trainer)[name] is patched[name] for name in patched if name != "train")
""")


@pytest.mark.slow
@need.UNSLOTH
def test_trainer_patch_survives_the_import_of_unsloth() -> None:
    run("""
patches.apply()
import unsloth
check_landed()
from transformers import Trainer
frozen = Trainer.__new__(Trainer)
frozen.train = frozen.train
names = list(vars(Trainer))
patches.undo()
assert list(vars(Trainer)) == names
calls.clear()
for train in (lambda: Trainer.train(), lambda: frozen.train(1, 2, 3, 4, 5)):
    try:
        train()
    except TypeError:
        pass  # Hugging Face's own train() refuses these arguments: ours let the call through.
    else:
        raise AssertionError("the original was not reached")
assert calls == []
""")


def test_trainer_patch_that_does_not_fit_reaches_the_user_from_the_import() -> None:
    # The lazy package of transformers turns some errors into ModuleNotFoundError; ours must be their cause then.
    run("""
bad = registry(needs=("no_such_parameter",))
bad.apply()
for statement in 2 * ["from transformers import Trainer", "import transformers.trainer"]:
    try:
        exec(statement)
    except Exception as error:
        found = error if isinstance(error, PatchError) else error.__cause__
        assert isinstance(found, PatchError) and "no_such_parameter" in str(found), repr(error)
    else:
        raise AssertionError(statement)
""")
