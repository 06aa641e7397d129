"""A rank's page: what it writes is what its supervisor reads, whoever dies in between."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from unsloth_multigpu.fault.beat import Beat, BeatPage, Phase, read_beats


def test_page_says_where_each_rank_is(tmp_path: Path) -> None:
    pages = [BeatPage(tmp_path, rank) for rank in (0, 11)]
    pages[0].mark(Phase.COMPUTE, step=7, micro_batch=3)
    begin = time.monotonic()
    pages[1].mark(step=2**40)
    pages[1].pulse(12, "all_reduce [8, 4] \u00e9")
    beats = read_beats(tmp_path)
    assert (beats[0].step, beats[0].phase, beats[0].micro_batch, beats[0].collective) == (7, Phase.COMPUTE, 3, -1)
    assert (beats[11].step, beats[11].phase, beats[11].collective) == (2**40, Phase.SCRIPT, 12)
    assert beats[11].operation == "all_reduce [8, 4] ?"
    assert begin <= beats[11].progress_s <= beats[11].alive_s <= time.monotonic()


def test_what_a_mark_leaves_out_stays(tmp_path: Path) -> None:
    page = BeatPage(tmp_path, 0)
    page.mark(Phase.COMPUTE, step=7, micro_batch=3)
    before = read_beats(tmp_path)[0].progress_s
    page.mark()
    beat = read_beats(tmp_path)[0]
    assert (beat.step, beat.phase, beat.micro_batch) == (7, Phase.COMPUTE, 3)
    assert beat.progress_s > before


def test_restarted_rank_begins_before_the_first_step(tmp_path: Path) -> None:
    first = BeatPage(tmp_path, 0)
    first.mark(Phase.COMPUTE, step=7)
    first.pulse(9, "barrier")
    BeatPage(tmp_path, 0)
    beat = read_beats(tmp_path)[0]
    assert beat == Beat(progress_s=beat.progress_s)


def test_page_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    BeatPage(tmp_path, 0)
    (tmp_path / "beat_rank_1").touch()
    assert set(read_beats(tmp_path)) == {0}


def test_page_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        BeatPage(tmp_path, 0)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "beat_rank_0").stat().st_mode) == 0o600


def test_page_without_a_supervisor_is_written_as_well() -> None:
    page = BeatPage(None, 0)
    page.mark(Phase.SAVE, step=3)
    assert (page.phase, page.step) == (Phase.SAVE, 3)
