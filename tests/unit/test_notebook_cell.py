"""Cells as text: what only rank 0 runs, and for which ranks a cell is."""

from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError

from unsloth_multigpu.notebook.kernel import names_broken_group
from unsloth_multigpu.notebook.kernel_share import is_rank_0_magic, read_ranks


@pytest.mark.parametrize(
    ("kind", "name", "module", "is_alone"),
    [
        ("line", "pip", "IPython.core.magics.packaging", True),
        ("line", "cd", "IPython.core.magics.osm", False),
        ("line", "time", "IPython.core.magics.execution", False),
        ("line", "sx", "IPython.core.magics.osm", False),
        ("line", "timeit", "IPython.core.magics.execution", True),
        ("line", "named_by_the_user", "IPython.core.alias", True),
        ("cell", "bash", "IPython.core.magics.script", True),
        ("cell", "capture", "IPython.core.magics.execution", False),
        ("cell", "writefile", "IPython.core.magics.osm", True),
        ("line", "ofthefrontend", "google.colab._magics", True),
        ("line", "ofthefrontend", "ipykernel.zmqshell", True),
        ("line", "unknown", None, True),
        ("cell", "mine", "__main__", False),
    ],
)
def test_magics_that_rank_0_runs_alone(kind, name, module, is_alone):
    magic = module and SimpleNamespace(__module__=module)
    assert is_rank_0_magic(kind, name, magic) is is_alone


def test_ranks_are_read():
    assert read_ranks(" 1 ", 2) == {1}
    assert read_ranks("0, 2", 3) == {0, 2}
    assert read_ranks("all", 3) == {0, 1, 2}
    for wrong in ("", "2", "-1", "0,", "x", "0 1"):
        with pytest.raises(UsageError, match=r"expected 0 \.\. 1"):
            read_ranks(wrong, 2)


def test_a_broken_group_is_known_by_its_words():
    assert names_broken_group(RuntimeError("[gloo/transport] Connection closed by peer [127.0.0.1]:1"))
    assert not names_broken_group(ValueError("3"))
