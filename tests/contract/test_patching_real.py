"""The patching mechanism on the real `Trainer.train`, which Unsloth wraps as well.

Each test is a fresh interpreter: a patch that lands at import can be seen once per process.
"""

from __future__ import annotations

import pytest

from tests.helpers import need
from tests.helpers.run import LIGHT, ROOT, run_well

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
