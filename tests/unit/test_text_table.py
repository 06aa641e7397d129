"""Tables as text, for a terminal and in Markdown."""

from __future__ import annotations

from unsloth_multigpu.text_table import aligned, markdown_table

ROWS = [("arm", "s", "what"), ("a", "10.5", "slow")]


def test_columns_stand_under_each_other_without_spaces_at_the_end() -> None:
    assert aligned(ROWS) == ["arm  s     what", "a    10.5  slow"]
    assert aligned(ROWS, num_left=1) == ["arm     s  what", "a    10.5  slow"]
    assert aligned([("a", ""), ("b", "c")]) == ["a", "b  c"]
    assert aligned([]) == []


def test_bar_in_a_cell_does_not_end_it_in_markdown() -> None:
    assert markdown_table(("a", "b"), [("1|2", "3")]) == "| a | b |\n|---|---|\n| 1\\|2 | 3 |\n"
