"""Sharded by accelerate: other models than a plain decoder against one process, and what is refused."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.outcome import largest_difference
from tests.helpers.run import BARE, run_python
from unsloth_multigpu.errors import SetupError

SCRIPT = Path(__file__).parent / "scripts" / "shard_kinds.py"
KINDS = ("llama", "vit", "llava", "picky")
REFUSED = {
    "t5": "share one weight, of which accelerate's FSDP2 would make two",
    "hooked": "The script's hook on the gradient of lm_head.weight is never called in a sharded training",
    "adafactor": "optim='adafactor' cannot train weights that are sharded by FSDP2 of accelerate",
    "inner": "model.norm.weight, lm_head.weight came out of step 1 unsharded: a part of the model was called by itself",
    "own_backward": "OwnBackward.training_step calls backward() by itself, and the model is sharded",
    "by_hand": "ByHand.compute_loss calls a part of the model by itself, and a sharded model gathers its weights when",
}
pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def train(folder, num_gpus, kinds):
    out = folder / str(num_gpus)
    run = run_python([SCRIPT, num_gpus, out, *kinds], folder, BARE)
    # Those that are refused come last, and the script goes on without them.
    assert run.code == (SetupError.exit_code if set(kinds) & set(REFUSED) else 0), run.err
    return out


def facts(out, kind):
    return [json.loads(path.read_text()) for path in sorted(out.glob(f"{kind}_[0-9].json"))]


@pytest.fixture(scope="module")
def outs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    return train(folder, 1, KINDS), train(folder, 2, [*KINDS, *REFUSED])


@pytest.mark.parametrize("kind", KINDS)
def test_model_trains_as_in_one_process(outs, kind):
    (one,), ranks = (facts(out, kind) for out in outs)
    assert [rank["refused"] for rank in ranks] == ["", ""]
    assert ranks[0]["norms"] == pytest.approx(one["norms"], rel=1e-5)
    # What one process does not move, the bias of attention's keys, is rounding in both.
    assert set(ranks[0]["unmoved"]) <= set(one["unmoved"])
    whole, sharded = (load_file(out / f"{kind}.safetensors") for out in outs)
    assert whole.keys() == sharded.keys()
    for name, weight in whole.items():
        assert float((weight - sharded[name]).abs().max()) <= 1e-5 * max(float(weight.abs().max()), 1e-2), name
    assert all(0.45 < rank["part"] < 0.55 for rank in ranks)


@pytest.mark.parametrize("saver", ["save_model", "save_pretrained"])
def test_files_have_the_names_of_one_process(outs, saver):
    """LLaVA's weights have other names in files."""
    kind = "llava"
    assert largest_difference(*(out / saver / kind / "model.safetensors" for out in outs)) <= 1e-6
    configs = [json.loads((out / saver / kind / "config.json").read_text()) for out in outs]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_sharded_is_refused_before_the_first_step(outs, kind):
    ranks = facts(outs[1], kind)
    assert len(ranks) == 2
    for rank in ranks:
        assert REFUSED[kind] in rank["refused"]
        assert "Hint:" in rank["refused"]
