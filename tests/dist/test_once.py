"""Side effects happen once: files, data sets, plots; and what every rank must have alike."""

import errno
from pathlib import Path

import pytest

from tests.helpers.outcome import facts_of
from tests.helpers.run import LIGHT, run_well
from tests.helpers.tiny import SMALLEST, build_tiny

SCRIPT = Path(__file__).parent / "scripts" / "once.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("once")
    build_tiny(path / "model", **SMALLEST)
    run_well([SCRIPT, path / "model", path / "once"], path, LIGHT)
    return facts_of(path / "once")


READ = """tokenizer_files tokenizer_reads_back adapter_files adapter_config final_files reloaded merged_parameters
plot_bytes written_bytes written_rows in_memory_lengths filtered own_folder_files weights"""


@pytest.mark.parametrize("fact", READ.split())
def test_every_rank_reads_what_rank_0_wrote(ranks, fact):
    assert ranks[0][fact]
    assert ranks[1][fact] == ranks[0][fact]


def test_data_set_is_written_by_rank_0_and_to_a_file_object_by_each(ranks):
    csv, json_, parquet = (f"{kind}DatasetWriter" for kind in ("Csv", "Json", "Parquet"))
    assert [r["writes"] for r in ranks] == [[json_, csv, parquet, json_, csv], [csv]]
    for fact in (rank["buffer_bytes"] for rank in ranks):
        assert fact[0] == fact[1] == ranks[0]["written_bytes"][1] > 0


def test_save_and_upload_that_fail_on_rank_0_are_caught_alike_and_soon(ranks):
    # An upload is refused offline, before anything is sent.
    for rank in ranks:
        assert rank["caught"] == [[errno.ENOTDIR, True], [errno.ENOTDIR, True], [None, True], [None, True]]


@pytest.mark.parametrize(
    ("fact", "of_ranks"),
    [
        ("in_memory_calls", [50, 0]),  # A data set is processed on one rank.
        ("on_disk_calls", [40, 0]),
        ("after_lonely_call", [[0, 2, 4, 6]] * 2),  # A call of rank 0 alone does not shift the others.
        ("is_drawn", [True, False]),
        ("status", [[0, 8], [1, 8]]),  # Rank and samples.
        ("wandb_mode", [None, "disabled"]),
        ("breakpoint", [None, "0"]),
        ("disabled", [[True, True]] * 2),  # The originals are back.
    ],
)
def test_each_rank_has_its_part(ranks, fact, of_ranks):
    assert [r[fact] for r in ranks] == of_ranks


def test_new_adapter_weights_are_those_of_rank_0(ranks):
    assert ranks[0]["weights"] == ranks[1]["weights"] == ranks[0]["reloaded"]


def test_ranks_draw_different_random_numbers_while_training(ranks):
    first, second = (rank["drawn_while_training"] for rank in ranks)
    assert len(first) == len(second) == 2
    assert not {*first} & {*second}


def test_checkpoint_holds_the_random_state_of_each_rank(ranks):
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= set(ranks[0]["checkpoint_files"])
