"""What this package calls of other libraries exists, with the arguments that it passes, from the oldest to the newest.

signatures.json holds what the oldest and the newest row of the matrix take. After a change in what we call, `make
signatures` records it.
"""

from __future__ import annotations

import json

import pytest

from tests.contract.signatures import RECORDED, Use, collect, describe, parse, problems, uses_in
from tests.matrix.record import known_rows

RECORDED_BY_ROW: dict[str, dict[str, str | None]] = json.loads(RECORDED.read_text(encoding="utf-8"))
USES = collect()
# What some version does not take or have, and how the code asks before it passes or calls it.
_NEEDS = "shard.count leaves sharded rows out by check_versions: transformers 5.17 needs a newer accelerate"
ALLOWED: dict[str, str] = {
    **dict.fromkeys(
        ("accelerate.FullyShardedDataParallelPlugin", "accelerate.utils.fsdp_utils.fsdp2_prepare_model"), _NEEDS
    ),
    "transformers.trainer_utils.rotate_checkpoints": "transformers 4 has a method of the Trainer, which is asked for",
}


def unknown(uses: list[Use], known: dict[str, str | None]) -> list[str]:
    return [f"{place}: {name}: {why}" for name, place, why in problems(uses, known) if name not in ALLOWED]


def test_both_ends_of_the_matrix_are_recorded() -> None:
    ends = {row["id"] for row in known_rows() if row.get("signatures")}
    assert ends == RECORDED_BY_ROW.keys() == {"oldest", "newest"}


@pytest.mark.parametrize("row", RECORDED_BY_ROW)
def test_row_takes_what_is_passed(row: str) -> None:
    assert unknown(USES, RECORDED_BY_ROW[row]) == []


def test_installed_libraries_take_what_is_passed() -> None:
    assert unknown(USES, {use.name: describe(use.name) for use in USES}) == []


def test_every_exception_is_needed() -> None:
    assert {name for known in RECORDED_BY_ROW.values() for name, *_ in problems(USES, known)} == ALLOWED.keys()


def test_calls_of_this_package_are_collected() -> None:
    calls = {(use.place.partition(":")[0], use.name, use.keywords) for use in USES if use.is_call}
    assert (
        "launch/nodes.py",
        "torch.distributed.rendezvous.TCPStore",
        ("is_master", "wait_for_workers", "timeout"),
    ) in calls
    assert ("step/snapshot.py", "torch.random.fork_rng", ("device_type",)) in calls
    assert len(calls) > 200


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch.save({}, 'file', compression=9)", "unexpected keyword argument 'compression'"),
        ("import torch\ntorch.load('a', 'b', 'c', 'd')", "too many positional arguments"),
        ("import torch\ntorch.optim.SGD()", "missing a required argument: 'params'"),
        ("import torch\ntorch.distributed.FastStore", "torch.distributed.FastStore: absent"),
        ("from transformers import NoSuchTrainer", "transformers.NoSuchTrainer: absent"),
    ],
)
def test_planted_fault_is_found(source: str, expected: str) -> None:
    uses = uses_in(source, "planted.py")
    found = unknown(uses, {use.name: describe(use.name) for use in uses})
    assert len(found) == 1
    assert found[0].startswith("planted.py:")
    assert expected in found[0]


def test_option_of_newer_versions_is_found_where_nothing_asks_for_it() -> None:
    # torch 2.6 takes no argument there.
    always = uses_in("import torch\ntorch.accelerator.current_accelerator(check_available=True)", "planted.py")
    (found,) = unknown(always, RECORDED_BY_ROW["oldest"])
    assert found.endswith("current_accelerator: got an unexpected keyword argument 'check_available'")
    assert unknown(always, RECORDED_BY_ROW["newest"]) == []


@pytest.mark.parametrize("text", ["()", "(a, /, b, c=..., *d, e, f=..., **g)", "(self, *, a=...)", "(*args, **kwargs)"])
def test_recorded_text_is_the_signature(text: str) -> None:
    assert str(parse(text)).replace("Ellipsis", "...") == text
