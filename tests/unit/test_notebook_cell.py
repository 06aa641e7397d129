"""Cells as text: where the line stands, what only rank 0 runs, what a worker cannot do again."""

import pytest
from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import TransformerManager

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.notebook.cell import is_python, is_rank_0_magic, names_broken_group, split_at
from unsloth_multigpu.notebook.kernel_share import read_ranks

CALL = "ump.enable_multi_gpu()"


def transform(source):
    """What IPython makes of a cell; 7.34 and 9.18 make the same."""
    return TransformerManager().transform_cell(source)


@pytest.mark.parametrize(
    ("source", "line", "before", "rest"),
    [
        (f"{CALL}\nx = 1\n", 1, "", f"{CALL}\nx = 1\n"),
        (f"import unsloth\n{CALL}\n", 2, "import unsloth\n", f"{CALL}\n"),
        (f"a = 1\nif a:\n    {CALL}\nb = 2\n", 3, "a = 1\n", f"if a:\n    {CALL}\nb = 2\n"),
        (f"with a:\n    {CALL}\n", 2, "", f"with a:\n    {CALL}\n"),
        (f"x = 1\ntry:\n    {CALL}\nfinally:\n    y()\n", 3, "x = 1\n", f"try:\n    {CALL}\nfinally:\n    y()\n"),
        (f"def f():\n    {CALL}\nx = 1\nf()\n", 4, f"def f():\n    {CALL}\nx = 1\n", "f()\n"),
        (
            "x = 1\nump.enable_multi_gpu(\n    num_gpus=2,\n)\n",
            3,
            "x = 1\n",
            "ump.enable_multi_gpu(\n    num_gpus=2,\n)\n",
        ),
        (f"import ump; {CALL}; x = 1\n", 1, "import ump; ", f"{CALL}; x = 1\n"),
        (f"s = 'äö'; {CALL}\n", 1, "s = 'äö'; ", f"{CALL}\n"),
        ("x = 1\n@turn(\n    1)\ndef f(): pass\n", 2, "x = 1\n", "@turn(\n    1)\ndef f(): pass\n"),
        (f"s = '\x0c\u2028'\n{CALL}\n", 2, "s = '\x0c\u2028'\n", f"{CALL}\n"),
        ("x = 1\n", 7, "", "x = 1\n"),
    ],
)
def test_a_cell_is_cut_before_the_statement(source, line, before, rest):
    assert split_at(source, line) == (before, rest)


def test_a_cell_is_cut_behind_what_ipython_alone_understands():
    source = transform(f"!pip install x\n%cd /tmp\nlen?\n{CALL}\nfiles = !ls\n")
    before, rest = split_at(source, 4)
    assert before.count("get_ipython()") == 3
    assert rest.startswith(CALL)
    assert "getoutput" in rest


@pytest.mark.parametrize("magic", ["%%time", "%%capture out", "%%capture --no-stderr"])
def test_a_cell_magic_stays_around_the_rest_of_its_cell(magic):
    source = transform(f"{magic}\n!pip install x\nimport unsloth\n{CALL}\nx = 1\n")
    before, rest = split_at(source, 3, transform)
    assert "pip install x" in before
    assert before.endswith("import unsloth\n")
    name, _, line = magic[2:].partition(" ")
    assert rest == f"get_ipython().run_cell_magic({name!r}, {line!r}, '{CALL}\\nx = 1\\n')"


@pytest.mark.parametrize("loop", ["for i in range(3):", "while True:", "if a:\n  for i in b:"])
def test_a_line_in_a_loop_is_refused(loop):
    source = f"{loop}\n    {CALL}\n"
    with pytest.raises(SetupError, match="loop"):
        split_at(source, source.count("\n"))


@pytest.mark.parametrize(
    ("kind", "name", "line", "module", "is_alone"),
    [
        ("line", "pip", "install x", "IPython.core.magics.packaging", True),
        ("line", "cd", "/tmp", "IPython.core.magics.osm", False),
        ("line", "time", "f()", "IPython.core.magics.execution", False),
        ("line", "timeit", "f()", "IPython.core.magics.execution", True),
        ("line", "store", "x", "IPython.extensions.storemagic", True),
        ("line", "store", "-r x", "IPython.extensions.storemagic", False),
        ("line", "named_by_the_user", "", "IPython.core.alias", True),
        ("cell", "bash", "", "IPython.core.magics.script", True),
        ("cell", "capture", "", "IPython.core.magics.execution", False),
        ("cell", "writefile", "a.py", "IPython.core.magics.osm", True),
        ("line", "ofthefrontend", "", "google.colab._magics", True),
        ("line", "ofthefrontend", "", "ipykernel.zmqshell", True),
        ("line", "unknown", "", None, True),
        ("cell", "mine", "", "__main__", False),
    ],
)
def test_magics_that_rank_0_runs_alone(kind, name, line, module, is_alone):
    assert is_rank_0_magic(kind, name, line, module) is is_alone


@pytest.mark.parametrize(("source", "is_one"), [("import a\n!ls\nx = !ls\n%pip install x", True), ("x = (", False)])
def test_a_cell_that_python_cannot_read_is_known(source, is_one):
    assert is_python(transform(source)) is is_one


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
