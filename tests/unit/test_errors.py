"""The exception tree: what each error is, says and ends a process with."""

import copy
import pickle
import re
from pathlib import Path

import pytest

import unsloth_multigpu
from unsloth_multigpu import errors
from unsloth_multigpu.errors import MultiGPUError

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
TREE = {
    errors.MultiGPUError: (Exception, 70),
    errors.ConfigError: (ValueError, 64),
    errors.SetupError: (RuntimeError, 69),
    errors.LaunchError: (RuntimeError, 71),
    errors.VersionError: (ImportError, 72),
    errors.PatchError: (TypeError, 73),
    errors.DistributedError: (RuntimeError, 76),
    errors.DivergenceError: (RuntimeError, 77),
    errors.RankTimeoutError: (TimeoutError, 124),
    errors.NonFiniteGradientError: (ArithmeticError, 78),
    errors.ResumeError: (ValueError, 79),
    errors.FederatedError: (RuntimeError, 80),
    errors.GeneratorError: (RuntimeError, 82),
    errors.SaveError: (OSError, 81),
}

each_error = pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)


def test_table_names_every_error_which_is_public_and_its_code_means_no_signal():
    defined = {value for value in vars(errors).values() if isinstance(value, type)}
    assert {kind for kind in defined if issubclass(kind, MultiGPUError)} == set(TREE)
    assert {kind.__name__ for kind in TREE} <= set(unsloth_multigpu.__all__)
    codes = {kind.exit_code for kind in TREE}
    assert len(codes) == len(TREE)
    # 1 and 2 are Python's own, 128 + n is a death by signal n.
    assert all(2 < code < 128 for code in codes)
    # The lazy imports of transformers turn a RuntimeError into "Could not import module".
    assert not issubclass(errors.PatchError, RuntimeError)


@each_error
def test_error_says_what_happened_and_what_to_do_also_in_another_process(kind):
    builtin, exit_code = TREE[kind]
    error = kind("num_gpus=0; expected 1 or more.", hint="Set num_gpus=1.")
    for again in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), isinstance(again, builtin), again.exit_code) == (kind, True, exit_code)
        assert str(again) == "num_gpus=0; expected 1 or more.\nHint: Set num_gpus=1."
    with pytest.raises(TypeError, match="hint"):
        kind("What happened.")


@each_error
def test_page_of_errors_lists_class_and_code_and_has_an_anchor(kind):
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.search(rf"\b{kind.__name__}\b", line)]
    assert any(re.search(rf"\b{kind.exit_code}\b", row) for row in rows), f"{PAGE} lacks {kind.__name__}"
    assert f"\n### {kind.__name__}\n" in page, f"errors.md#{kind.__name__.lower()}"


def test_refusal_is_an_error_that_one_process_would_not_have_met():
    always = (errors.SetupError, errors.ConfigError, errors.PatchError, errors.DivergenceError)
    at_first = (errors.DistributedError, errors.RankTimeoutError)
    for kind in (*always, *at_first, errors.NonFiniteGradientError):
        refused = [errors.is_refusal(kind("no", hint="None."), num_steps) for num_steps in (0, 3)]
        assert refused == [kind in (*always, *at_first), kind in always], kind
