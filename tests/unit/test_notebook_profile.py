"""What of a kernel goes to its workers beside its cells."""

from __future__ import annotations

import collections
import json
import math
import sys
import types
from pathlib import Path

import pytest
from traitlets.config import Config

from unsloth_multigpu.notebook.cell import bound_names
from unsloth_multigpu.notebook.profile import _names_to_send, _plain_config


def test_names_that_cells_bind() -> None:
    cells = [
        "import a.b, c.d as e\nfrom f import g as h, i",
        "def j(k): l = 1\nclass m: pass",
        "for n, o in (): pass\nwith p() as q: r += 1\ndel s[0]\nt.u = 1",
        "no Python (",
        "if (v := 1): pass\nasync def w(): pass\n[x for x in ()]",
    ]
    assert bound_names(cells) == set("aehijlmnoqrvwx")


def test_what_another_process_can_make_is_sent() -> None:
    values = {
        "np": math,
        "Path": Path,
        "Count": collections.Counter,
        "notebook": "/a 'b'.ipynb",
        "plain": {"a": [1, (2.5, None)]},
    }
    lines = _names_to_send(values, ())
    made: dict[str, object] = {}
    exec("\n".join(lines.values()), made)
    assert {name: made[name] for name in values} == values
    assert _names_to_send(values, {"np", "Path", "Count"}).keys() == {"notebook", "plain"}


def test_what_another_process_cannot_make_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    late = types.ModuleType("late_module")
    late.function = types.FunctionType((lambda: 1).__code__, {}, "function")  # type: ignore[attr-defined]
    late.function.__module__ = "late_module"
    late.function.__qualname__ = "function"
    early, unsloth = types.ModuleType("early_module"), types.ModuleType("unsloth")
    for module in (early, unsloth, late):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    values = {
        "early": early,
        # A worker imports Unsloth before what Unsloth changes, too.
        "unsloth": unsloth,
        "late": late,
        "function": late.function,
        "local": lambda: 1,
        "shadow": types.ModuleType("math"),
        "thing": object(),
        "long": "x" * 10_000,
        "infinite": math.inf,
        "not a name": 1,
        "class": 1,
        **dict.fromkeys(["_", "__", "_i", "_ii", "_3", "_i3", "_dh", "_oh", "_ih", "In", "Out"], 1),
        "_exit_code": 0,
    }
    assert _names_to_send(values, ()) == {"early": "import early_module as early", "_exit_code": "_exit_code = 0"}


def test_what_is_sent_has_a_limit() -> None:
    # One variable of the environment holds 128 KiB.
    sent = _names_to_send({f"name_{i}": "\u4e2d" * 300 for i in range(200)}, ())
    assert 50_000 < len(json.dumps(sent)) < 65_000


def test_a_configuration_is_sent_as_far_as_it_is_plain() -> None:
    config = Config()
    config.AliasManager.user_aliases.append(("la", "ls -al"))
    config.StoreMagics.autorestore = True
    config.IPKernelApp.kernel_class = object
    config.other = 1
    plain = {"AliasManager": {"user_aliases": [["la", "ls -al"]]}, "StoreMagics": {"autorestore": True}}
    assert _plain_config(config) == plain
    config.AliasManager.user_aliases.append(("lb", "ls"))  # The kernel's own is not changed by being read.
    assert len(config.AliasManager.user_aliases.get_value([])) == 2
