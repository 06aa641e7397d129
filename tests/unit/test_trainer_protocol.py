"""The protocols of the Trainer hold what the table of seams steers, and nothing that the package does not use."""

from __future__ import annotations

import inspect
import re

from tests.helpers.protocol import members
from tests.unit.test_house_rules import MODULES
from unsloth_multigpu import trainer_protocol
from unsloth_multigpu.seam import SEAMS, InstanceSeam
from unsloth_multigpu.trainer_protocol import (
    AcceleratorLike,
    CallbackHandlerLike,
    OptionalTrainer,
    TrainerLike,
)

OWNERS = {"trainer": TrainerLike, "accelerator": AcceleratorLike, "callback_handler": CallbackHandlerLike}
PROTOCOLS = [value for value in vars(trainer_protocol).values() if inspect.isclass(value) and "Like" in value.__name__]


def misfits(seams: list[InstanceSeam]) -> list[str]:
    found = []
    for seam in seams:
        protocol: type = OptionalTrainer if seam.optional and seam.owner == "trainer" else OWNERS[seam.owner]
        method = getattr(protocol, seam.name, None)
        if method is None:
            found.append(f"{seam.target}: no member of {protocol.__name__}")
        elif missing := [name for name in seam.needs if name not in inspect.signature(method).parameters]:
            found.append(f"{seam.target}: no parameter {', '.join(missing)}")
    return found


def test_every_steered_method_is_a_member_with_the_parameters_that_it_needs() -> None:
    steered = [seam for seam in SEAMS.values() if seam.owner in OWNERS]
    assert len(steered) > 25
    assert misfits(steered) == []


def test_every_member_is_used() -> None:
    source = "\n".join(p.read_text(encoding="utf-8") for p in MODULES if p.stem != "trainer_protocol")
    names = {name for protocol in (*PROTOCOLS, OptionalTrainer) for name in members(protocol)} - set(SEAMS)
    assert len(names) > 50
    assert [name for name in sorted(names) if not re.search(rf"""[.'"]{name}\b""", source)] == []
