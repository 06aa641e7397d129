"""The protocols of the Trainer hold nothing that the package does not use."""

import inspect
import re

from tests.helpers.protocol import members
from tests.unit.test_house_rules import MODULES
from unsloth_multigpu import trainer_protocol
from unsloth_multigpu.trainer_protocol import OptionalTrainer

PROTOCOLS = [value for value in vars(trainer_protocol).values() if inspect.isclass(value) and "Like" in value.__name__]


def test_every_member_is_used():
    source = "\n".join(p.read_text(encoding="utf-8") for p in MODULES if p.stem != "trainer_protocol")
    names = {name for protocol in (*PROTOCOLS, OptionalTrainer) for name in members(protocol)}
    assert len(names) > 50
    assert [name for name in sorted(names) if not re.search(rf"""[.'"]{name}\b""", source)] == []
