"""Every kind of data source: two and three ranks see, in each step, the samples of one process."""

from pathlib import Path

import pytest

from tests.helpers.outcome import assert_near, facts_of
from tests.helpers.run import light, run_well

SCRIPT = Path(__file__).parent / "scripts" / "data.py"
LIBRARIES = light("peft", "rich", "triton")
SOURCES = """plain grouped own_sampler mean_loss evaluated masked_lm hf_dataset end_to_end drop_last workers silent
fixed_width streaming whole scheduled looked_at looked_at_stream own_generator_workers hf_streaming"""
# name -> rows that one process predicts
EVALUATED = {
    "eval_drop": 20,
    "eval_drop_few": 4,
    "eval_drop_all": 0,
    "eval_inputs": 10,
    # Each batch is one row, and the last has one sample: only other ranks can say that none is missing.
    "eval_inputs_end_to_end": 3,
    "eval_short": 7,
    "eval_stream": 22,
    "eval_own_batches": 18,
    "eval_own_loader": 11,
}
BY_HAND = "read_by_hand"
THREE = pytest.param(3, marks=pytest.mark.thorough)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def train(folder, num_ranks):
    """Trains from all sources when a test first asks for that number of ranks."""
    out = folder / str(num_ranks)
    if not out.exists():
        out.mkdir()
        run = run_well([SCRIPT, str(num_ranks), out], folder, LIBRARIES)
        (out / "stderr.txt").write_text(run.err)
    return out


def ranks(folder, num_ranks, name):
    return facts_of(train(folder, num_ranks) / name, num_ranks)


def samples(found):
    """Sample numbers of each step, over all ranks, sorted."""
    steps = {step for rank in found for step in rank["steps"]}
    return {step: sorted(i for rank in found for i in rank["steps"].get(step, [])) for step in steps}


@pytest.mark.parametrize("num_ranks", [2, THREE])
@pytest.mark.parametrize("name", SOURCES.split())
def test_source_gives_the_steps_of_one_process(folder, name, num_ranks):
    one, many = ranks(folder, 1, name), ranks(folder, num_ranks, name)
    assert len(samples(one)) >= 6
    # A filler of the mean loss cannot be told from a sample; these rows leave none without one.
    assert samples(many) == samples(one)
    assert many[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    assert many[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)
    assert many[0]["weights"] == pytest.approx(one[0]["weights"], rel=1e-4, abs=1e-4)


def test_schedule_counted_by_the_loader_is_that_of_one_process(folder):
    (one,), two = ranks(folder, 1, "scheduled"), ranks(folder, 2, "scheduled")
    assert len(one["steps"]) == one["num_steps"] == 8
    for rank in two:
        # Also in the order of the rows: what a script reads before the training is what one process reads.
        assert [rank[n] for n in ("num_steps", "batches")] == [one[n] for n in ("num_steps", "batches")]
        assert rank["learning_rate"] == pytest.approx(one["learning_rate"], rel=1e-9)


@pytest.mark.parametrize("name", ["looked_at", "looked_at_stream"])
def test_loader_asked_for_in_a_training_has_the_batches_of_one_process(folder, name):
    (one,), (mine, other) = ranks(folder, 1, name), ranks(folder, 2, name)
    assert len(one["seen"]) == 2
    assert all(is_dict for is_dict, *_ in one["seen"])
    assert mine["seen"] == one["seen"]
    assert other["seen"] == []


@pytest.mark.parametrize("num_ranks", [2, THREE])
def test_loader_of_an_evaluation_has_the_batches_of_one_process_for_a_script(folder, num_ranks):
    one = ranks(folder, 1, BY_HAND)[0]
    batches = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]
    assert (one["length"], one["rows"]) == ([4, 3], [batches, [*batches[:2], [7, 8]]])
    for found in ranks(folder, num_ranks, BY_HAND):
        for name in ("length", "rows", "heard", "gathered", "own_gathering_loop"):
            assert found[name] == one[name], name
        for name in ("handed", "behind", "own", "own_loop"):
            assert found[name] == pytest.approx(one[name], rel=1e-5), name
        assert found["heard"] == [batches, batches]
        assert len(found["own"]) == 3
        # Transformers keeps these loaders and gives them out again.
        for (loss, rows), (expected, _) in zip(found["kept"], one["kept"], strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
            assert rows == batches


def test_evaluation_is_that_of_one_process_and_rank_0_decides(folder):
    one, (mine, other) = ranks(folder, 1, "evaluated")[0], ranks(folder, 2, "evaluated")
    assert mine["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    # The last one is made after the training, where nobody decides by it.
    assert mine["heard"] == [0, 0, 0]
    assert other["heard"] == [0, 0, 1]
    assert mine["dir"] == other["dir"]


@pytest.mark.parametrize("num_ranks", [2, THREE])
@pytest.mark.parametrize("name", EVALUATED)
def test_rows_of_an_evaluation_are_those_of_one_process(folder, name, num_ranks):
    one, many = ranks(folder, 1, name)[0], ranks(folder, num_ranks, name)
    num_rows = EVALUATED[name]
    assert len(one["predictions"] or []) == num_rows
    for found in many:
        assert (found["label_ids"], found["inputs"]) == (one["label_ids"], one["inputs"])
        assert_near(found["predictions"], one["predictions"], rel=1e-4, most=1e-5)
        assert (found["eval_loss"] is None) == (num_rows == 0)
        if num_rows:
            assert (one["inputs"] is None) == (name in ("eval_drop", "eval_drop_few"))
            assert found["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("num_ranks", [2, THREE])
def test_run_resumed_in_an_epoch_sees_the_rest_and_ends_equal(folder, num_ranks):
    whole, resumed = ranks(folder, num_ranks, "whole"), ranks(folder, num_ranks, "resumed")
    rest = {step: found for step, found in samples(whole).items() if int(step) >= 3}
    assert samples(resumed) == rest
    if num_ranks == 2:
        assert resumed[0]["weights"] == whole[0]["weights"]
    # DDP regroups its buckets after the first step, and three numbers are added in another order then.
    assert resumed[0]["weights"] == pytest.approx(whole[0]["weights"], rel=1e-6)


@pytest.mark.parametrize("num_ranks", [2, THREE])
def test_resumed_stream_goes_on_where_it_was(folder, num_ranks):
    whole, resumed = ranks(folder, num_ranks, "stream_whole"), ranks(folder, num_ranks, "stream_resumed")
    assert samples(resumed) == {step: found for step, found in samples(whole).items() if int(step) >= 3}


def computed_tokens(folder, name):
    return sum(rank["computed_tokens"] for rank in ranks(folder, 2, name))


def test_rows_of_known_lengths_are_dealt_with_less_padding(folder):
    in_order = computed_tokens(folder, "silent")
    for name in ("plain", "hf_dataset", "workers"):
        assert computed_tokens(folder, name) < 0.8 * in_order, name


def pairs(folder, names, **options):
    """Facts of one process with these options, and of one without."""
    out = folder / "_".join(options)
    out.mkdir()
    variables = {f"UNSLOTH_MULTIGPU_{name}": value for name, value in options.items()}
    run = run_well([SCRIPT, "1", out, ",".join(names)], folder, {**LIBRARIES, **variables})
    return {name: (facts_of(out / name, 1)[0], ranks(folder, 1, name)[0]) for name in names}, run.err


@pytest.mark.thorough
def test_one_process_is_planned_when_asked(folder):
    for name, (planned, plain) in pairs(folder, ["plain", "workers", "end_to_end"], BALANCE="tokens")[0].items():
        assert samples([planned]) == samples([plain])
        assert planned["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
        if name != "end_to_end":
            assert planned["computed_tokens"] < 0.8 * plain["computed_tokens"], name


@pytest.mark.thorough
def test_one_process_that_is_guarded_computes_the_same_micro_batches(folder):
    found, told = pairs(folder, ["plain", "silent"], ON_NAN="skip")
    assert "by length" not in told
    for name, (guarded, plain) in found.items():
        assert guarded["computed_tokens"] == plain["computed_tokens"], name
        assert guarded["grad_norm"] == plain["grad_norm"], name


def test_one_line_says_how_samples_are_dealt(folder):
    lines = (train(folder, 2) / "stderr.txt").read_text().splitlines()
    for reason, count in {
        "the lengths of a stream are unknown": 5,
        "Silent has no attribute `lengths` with the tokens of each row": 1,
        "the collator turns a row of 2 tokens into 32, and one of 14 into 32": 1,
    }.items():
        assert sum(line.endswith(f", dealt in order: {reason}") for line in lines) == count, reason
    assert any(line.endswith("dealt by length (2 to 14 tokens)") for line in lines)


def test_tokens_are_counted_over_all_ranks(folder):
    # Padding differs with the rows that a micro-batch has; without it the counts are equal.
    one, two = ranks(folder, 1, "plain")[0]["tokens_seen"], ranks(folder, 2, "plain")[0]["tokens_seen"]
    assert 0.5 * one < two <= one
