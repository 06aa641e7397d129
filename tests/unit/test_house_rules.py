"""The house rules that a program can check. Every check is also shown a violation, so that none passes by accident."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "unsloth_multigpu"
MODULES = sorted(PACKAGE.rglob("*.py"))
OWN_FILES = sorted(
    path for folder in ("unsloth_multigpu", "tests", "examples") for path in (ROOT / folder).rglob("*.py")
)
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60

# The layers of docs/architecture.md. "sync.*" is every file of that folder. A file that nothing names is a failure.
LAYERS = {
    "errors": 0,
    "logs": 0,
    "versions": 0,
    "options": 0,
    "row": 0,
    "strategy": 0,
    "table": 0,
    "report": 0,
    "fault.beat": 0,
    "fault.control": 0,
    "fault.watchdog": 0,
    "fault.checkpoint": 1,
    "fault.chaos": 1,
    "patching": 1,
    "core.seam": 1,
    "context": 0,
    "part": 1,
    "tool": 1,
    "train.loop": 2,
    "launch.identity": 1,
    "launch.allocator": 1,
    "launch.spawned": 1,
    "launch.cause": 1,
    "launch.process": 1,
    "launch.stack": 1,
    "launch.watch": 1,
    "launch.stop": 1,
    "launch.folder": 1,
    "launch.nodes": 1,
    "data.cost": 1,
    "data.deal": 1,
    "data.plan": 1,
    "data.generation": 1,
    "launch.channel": 0,
    "launch.child": 1,
    "federated.option": 0,
    "federated.report": 0,
    "federated.placement": 1,
    "federated.adapters": 2,
    "federated.aggregation": 2,
    "federated.checkpoint": 2,
    "federated.record": 2,
    "federated.strategy": 2,
    "federated.server": 5,
    "federated.*": 3,
    "notebook.judge": 1,
    "notebook.cell": 1,
    "notebook.group": 2,
    "notebook.recovery": 3,
    "notebook.*": 5,
    "core.random_state": 2,
    "core.manager": 2,
    "core.weighing": 2,
    "core.tracing": 2,
    "core.replica": 2,
    "core.wrap": 2,
    "core.state": 2,
    "launch.rendezvous": 2,
    "launch.backend": 2,
    "launch.engine": 2,
    "launch.membership": 2,
    "data.ahead": 2,
    "data.draw": 2,
    "data.step": 2,
    "data.stream": 2,
    "data.sampler": 2,
    "data.length": 2,
    "data.loader": 2,
    "sync.*": 2,
    "proof.*": 2,
    "fault.*": 2,
    "core.trainer": 3,
    "core.progress": 3,
    "core.wrapping": 3,
    "core.loss": 3,
    "core.trial": 3,
    "core.observe": 3,
    "core.snapshot": 3,
    "core.shard": 3,
    "core.guard": 3,
    "core.inject": 3,
    "core.checkpoint": 3,
    "core.resume": 3,
    "core.steps": 3,
    "core.metrics": 3,
    "core.evaluation": 3,
    "core.exchange": 3,
    "core.facts": 3,
    "core.balance": 3,
    "core.attention": 3,
    "core.collation": 3,
    "core.stopwatch": 3,
    "core.buffer": 3,
    "core.traffic": 3,
    "core.trainable": 3,
    "core.check": 3,
    "core.control": 3,
    "core.view": 3,
    "core.search": 3,
    "core.serial": 3,
    "hooks.journal": 1,
    "hooks.effect": 1,
    "hooks.*": 4,
    "launch.launcher": 4,
    "launch.rank": 4,
    "launch.script": 4,
    "launch.draw": 2,
    "plugin": 5,
    "program": 5,
    "plain": 5,
    "session": 5,
    "start": 5,
    "cli.*": 5,
    "__init__": 6,
}
# Which layers a layer may import while it is itself imported, and which inside a function. Files of one folder and one
# layer may build on each other as well, but for the edges: each of those stands alone.
AT_TOP = {0: {0}, 1: {0}, 2: {0, 1}, 3: {0, 1, 2}, 4: {0, 1}, 5: {0, 1}, 6: set()}
INSIDE = {0: {0}, 1: {0}, 2: {0, 1}, 3: {0, 1, 2}, 4: {0, 1, 2, 3, 4}, 5: {0, 1, 2, 3, 4, 5}, 6: {0, 1, 2, 3, 4, 5}}
EDGES = 4
LIGHT = {"packaging", "psutil", "wrapt"}
HEAVY = {"torch", "numpy", "transformers", "trl", "peft", "accelerate", "datasets", "unsloth", "unsloth_zoo"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def layer_of(module: str) -> int | None:
    """Returns None for a module that no line of `LAYERS` names."""
    if module.endswith(".__init__"):
        return 0  # It runs before every module of its folder, so it may import no more than the lowest of them.
    return LAYERS.get(module, LAYERS.get(module.split(".")[0] + ".*"))


def folder(module: str) -> str:
    return module.rpartition(".")[0]


def imports(node: ast.AST, module: str, where: str = "top") -> Iterator[tuple[str, str, int]]:
    """Yields (dotted name, where, line); `where` is "top", "inside" (a function) or "typing" (never executed)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, where, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = ["unsloth_multigpu", *module.split(".")][: -child.level] if child.level else []
            base = ".".join([*package, *filter(None, [child.module])])
            yield from ((f"{base}.{alias.name}", where, child.lineno) for alias in child.names)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).split(".")[-1] in ("import_module", "__import__"):
            name = child.args[0] if child.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, where, child.lineno
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from imports(ast.Module(child.body, []), module, "typing")
            yield from imports(ast.Module(child.orelse, []), module, where)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and where == "top":
            yield from imports(child, module, "inside")
        else:
            yield from imports(child, module, where)


def own_module(name: str) -> str:
    """`unsloth_multigpu.errors.ConfigError` -> `errors`; what is no module of ours is an attribute of the face."""
    parts = name.split(".")[1:]
    known = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    # A name in a file of a whole folder ("sync.*") is no file.
    files = [module for module in known if (PACKAGE / module.replace(".", "/")).with_suffix(".py").exists()]
    return next((module for module in [*files, *known] if layer_of(module) is not None), "__init__")


def layer_violations(source: str, module: str) -> list[str]:
    layer = layer_of(module)
    if layer is None:
        return [f"{module}: in no layer; add it to LAYERS and to the page that it follows"]
    found = []
    for name, where, line in imports(ast.parse(source), module):
        root = name.split(".")[0]
        if root == "unsloth_multigpu":
            target = layer_of(own_module(name))
            allowed = {"top": AT_TOP[layer], "inside": INSIDE[layer], "typing": INSIDE[layer] | {layer}}[where]
            neighbours = target == layer != EDGES and folder(own_module(name)) == folder(module)
            if target not in allowed and not neighbours:
                found.append(f"{module}:{line}: layer {layer} imports {name} of layer {target} ({where})")
        elif root not in sys.stdlib_module_names and not third_party_is_allowed(root, layer, where):
            found.append(f"{module}:{line}: layer {layer} imports {name} ({where})")
    return found


def third_party_is_allowed(root: str, layer: int, where: str) -> bool:
    if where == "typing":
        return True
    if root in LIGHT:
        return where == "inside" or 1 <= layer <= 5
    return layer in (2, 3) and root in ("torch", "flwr") if where == "top" else layer >= 2


def reach_back_violations(source: str, module: str) -> list[str]:
    """A notebook is given its session and what opens and closes it: it looks for neither, also inside functions."""
    if folder(module) != "notebook":
        return []
    found = imports(ast.parse(source), module)
    return [
        f"{module}:{line}: imports {name} ({where})"
        for name, where, line in found
        if where != "typing" and name.startswith("unsloth_multigpu") and own_module(name) in ("plugin", "session")
    ]


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports, at the top or inside a function."""
    return {
        module_name(path): {
            own_module(name)
            for name, where, _ in imports(ast.parse(path.read_text(encoding="utf-8")), module_name(path))
            if where != "typing" and name.startswith("unsloth_multigpu")
        }
        for path in MODULES
    }


def is_on_a_circle(graph: Mapping[str, set[str]], module: str) -> bool:
    """True if a module imports itself, over whichever others."""
    seen: set[str] = set()
    new = set(graph.get(module, ()))
    while new:
        seen |= new
        new = {target for one in new for target in graph.get(one, ())} - seen
    return module in seen


def style_violations(source: str, module: str) -> list[str]:
    """Print, broad except, length and emoji."""
    found = [f"{len(lines)} lines"] if len(lines := source.splitlines()) > MAX_MODULE_LINES else []
    found += [f"emoji in line {n}" for n, line in enumerate(lines, 1) if has_emoji(line)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > MAX_FUNCTION_LINES:
            found.append(f"{node.name} has {code_lines(node)} lines")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and not module.startswith("cli."):
            found.append(f"print in line {node.lineno}")
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not isinstance(node.body[-1], ast.Raise):
            found.append(f"broad except goes on in line {node.lineno}")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress") and any(map(is_broad, node.args)):
            found.append(f"broad suppress in line {node.lineno}")
    return [f"{module}: {fact}" for fact in found]


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which may be as long as it needs."""
    length = (node.end_lineno or 0) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return length
    docstring = node.body[0]
    return length - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def is_broad(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(name is None or ast.unparse(name).split(".")[-1] in ("Exception", "BaseException") for name in names)


def has_emoji(text: str) -> bool:
    return re.search("[\u2600-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff]", text) is not None


def run_tool(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=280
    )


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_respects_the_layers(path: Path) -> None:
    assert layer_violations(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("utils", ""),
        ("core.new_file", ""),
        ("errors", "from unsloth_multigpu.patching import Patch"),
        ("errors", "import wrapt"),
        ("errors", "def f():\n    import torch"),
        ("launch.__init__", "from unsloth_multigpu.launch import launcher"),
        ("launch.__init__", "from . import launcher"),
        ("launch.identity", "from ..core.manager import DDPManager"),
        ("data.plan", "import torch"),
        ("core.manager", "def f():\n    from unsloth_multigpu.core.trainer import DDPTrainer"),
        ("core.manager", "import transformers"),
        ("core.manager", "from unsloth_multigpu.data.sampler import StepLoader"),
        ("core.trainer", "try:\n    from trl import SFTTrainer\nexcept ImportError: pass"),
        ("core.trainer", "from unsloth_multigpu import enable_multi_gpu"),
        ("hooks.trainer", "import unsloth_multigpu.core.trainer"),
        ("hooks.trainer", "from . import saving"),
        ("hooks.trainer", "class A:\n    import torch"),
        ("launch.launcher", "def f():\n    from unsloth_multigpu import plugin"),
        ("plugin", "import importlib\nx = importlib.import_module('datasets')"),
        ("plugin", "from unsloth_multigpu.launch.launcher import DDPLauncher"),
        ("plugin", "from unsloth_multigpu.cli import main"),
        ("plugin", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
        ("plugin", "if not TYPE_CHECKING:\n    import torch"),
        ("__init__", "from .plugin import enable_multi_gpu"),
    ],
)
def test_layer_check_catches_a_planted_violation(module: str, source: str) -> None:
    assert len(layer_violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("options", "import os\nfrom unsloth_multigpu.errors import ConfigError"),
        ("versions", "def f():\n    from packaging.version import Version"),
        (
            "core.trainer",
            "import torch\nfrom .manager import DDPManager\ndef f():\n    from transformers import set_seed",
        ),
        (
            "hooks.trainer",
            "if TYPE_CHECKING:\n    import torch\n    from unsloth_multigpu.core.manager import DDPManager",
        ),
        ("cli.main", "def f():\n    from unsloth_multigpu.cli import doctor\n    from unsloth_multigpu import plugin"),
        ("plugin", "from unsloth_multigpu.session import Session"),
        ("core.trainer", "from unsloth_multigpu.core.steps import StepFeed"),
        ("fault.a_file_of_tomorrow", "import torch"),
    ],
)
def test_layer_check_lets_the_allowed_pass(module: str, source: str) -> None:
    assert layer_violations(source, module) == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "notebook").glob("*.py")), ids=module_name)
def test_notebook_looks_for_no_session(path: Path) -> None:
    assert reach_back_violations(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from unsloth_multigpu import plugin",
        "def f():\n    from unsloth_multigpu.session import open_session",
        "import importlib\nimportlib.import_module('unsloth_multigpu.plugin')",
        "def f():\n    from .. import plugin",
    ],
)
def test_notebook_check_catches_a_planted_violation(source: str) -> None:
    assert len(reach_back_violations(source, "notebook.start")) == 1
    allowed = "if TYPE_CHECKING:\n    from unsloth_multigpu.session import Session"
    assert reach_back_violations(allowed, "notebook.start") == reach_back_violations(source, "cli.doctor") == []


def test_no_module_of_a_notebook_imports_itself_over_others() -> None:
    graph = import_graph()
    assert [module for module in graph if folder(module) == "notebook" and is_on_a_circle(graph, module)] == []


def test_circle_check_catches_a_planted_violation() -> None:
    graph = import_graph()
    graph["notebook.process"] = {*graph["notebook.process"], "notebook.start"}
    assert is_on_a_circle(graph, "notebook.process")
    assert is_on_a_circle(graph, "notebook.kernel")


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_keeps_the_style(path: Path) -> None:
    assert style_violations(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ("print('x')", "print"),
        ("try: f()\nexcept Exception: pass", "broad except"),
        ("try: f()\nexcept: pass", "broad except"),
        ("try: f()\nexcept (OSError, BaseException) as e:\n    if e: raise\n    g()", "broad except"),
        ("with contextlib.suppress(Exception): f()", "broad suppress"),
        ("x = '\U0001f680'", "emoji"),
        ("x = 1\n" * (MAX_MODULE_LINES + 1), "501 lines"),
        ("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, "f has 61 lines"),
    ],
)
def test_style_check_catches_a_planted_violation(source: str, fact: str) -> None:
    (violation,) = style_violations(source, "plugin")
    assert fact in violation


@pytest.mark.parametrize(
    "source",
    [
        "try: f()\nexcept OSError: pass",
        "try: f()\nexcept Exception as e:\n    g()\n    raise Named(e) from e",
        'def f():\n    """' + "A long docstring.\n" * MAX_FUNCTION_LINES + '    """\n    return 1',
    ],
)
def test_style_check_lets_the_allowed_pass(source: str) -> None:
    assert style_violations(source, "plugin") == []


def test_print_is_allowed_on_the_command_line() -> None:
    assert style_violations("print('x')", "cli.main") == []


def test_texts_hold_no_emoji() -> None:
    texts = [*OWN_FILES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    assert [str(path) for path in texts if has_emoji(path.read_text(encoding="utf-8"))] == []


def test_ruff_finds_nothing() -> None:
    for command in (["check"], ["format", "--check"]):
        result = run_tool("ruff", *command)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("command", "source", "fact"),
    [
        (["check"], "print('x')\n", "T201"),
        (["check"], "import os\n", "F401"),
        (["check"], f"x = '{'a' * 120}'\n", "E501"),
        (["format", "--diff"], "x  =  'single'\n", '+x = "single"'),
    ],
)
def test_ruff_catches_a_planted_violation(command: list[str], source: str, fact: str) -> None:
    result = run_tool("ruff", *command, "--stdin-filename", "unsloth_multigpu/planted.py", "-", stdin=source)
    assert result.returncode == 1
    assert fact in result.stdout + result.stderr


def test_ruff_and_pytest_pass_over_no_file(pytestconfig: pytest.Config) -> None:
    # Both tools leave out folders named `dist` unless told otherwise, and tests/dist is one.
    assert {str(path) for path in OWN_FILES} <= set(run_tool("ruff", "check", "--show-files").stdout.splitlines())
    assert "dist" not in pytestconfig.getini("norecursedirs")


def test_mypy_strict_finds_nothing() -> None:
    result = run_tool("mypy", "--strict")
    assert result.returncode == 0, result.stdout + result.stderr


def test_mypy_catches_a_planted_violation(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def f(x):\n    return x\n")
    result = run_tool("mypy", "--config-file", "pyproject.toml", "--cache-dir", str(tmp_path), str(planted))
    assert result.returncode == 1
    assert "no-untyped-def" in result.stdout


IMPORT_PROBE = """
import json, logging, signal, sys, threading, time
def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return handlers, sys.excepthook, threading.excepthook, list(sys.meta_path), list(logging.root.handlers)
before, start = state(), time.perf_counter()
import unsloth_multigpu
elapsed_s = time.perf_counter() - start
same = state() == before and not logging.getLogger("unsloth_multigpu").handlers
file = unsloth_multigpu.__file__
print(json.dumps({"elapsed_s": elapsed_s, "modules": list(sys.modules), "same": same, "file": file}))
"""


def import_violations(folder: Path) -> list[str]:
    """Imports the package that lies in `folder` in fresh interpreters; the quickest of five counts as its time."""
    command = [sys.executable, "-c", IMPORT_PROBE]
    runs = [
        json.loads(subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=60).stdout)
        for _ in range(5)
    ]
    assert all(Path(run["file"]).is_relative_to(folder) for run in runs)
    found = [f"loads {name}" for name in sorted(HEAVY & set(runs[0]["modules"]))]
    found += [] if runs[0]["same"] else ["sets a handler or a hook"]
    elapsed_s = min(run["elapsed_s"] for run in runs)
    return found + ([f"takes {elapsed_s:.3f} s"] if elapsed_s >= 0.1 else [])


def test_import_is_free() -> None:
    assert import_violations(ROOT) == []


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ("import numpy", "loads numpy"),
        ("import signal; signal.signal(signal.SIGTERM, print)", "sets a handler"),
        ("import time; time.sleep(0.11)", "takes 0.11"),
    ],
)
def test_import_check_catches_a_planted_violation(tmp_path: Path, source: str, fact: str) -> None:
    (tmp_path / "unsloth_multigpu").mkdir()
    (tmp_path / "unsloth_multigpu" / "__init__.py").write_text(source)
    assert fact in " ".join(import_violations(tmp_path))


LEAKS = {
    "a variable": "import os; os.environ['RANK'] = '7'",
    "a thread": "import threading, time; threading.Thread(target=time.sleep, args=(2,)).start()",
    "a process": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
    "a process group": "import torch.distributed as d; d.init_process_group('gloo', rank=0, world_size=1, "
    "store=d.HashStore())",
}


def test_leaks_fail_the_test_that_leaves_them(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    bodies = [*LEAKS.values(), "pass"]
    code = "".join(f"def test_{number}():\n    {body}\n" for number, body in enumerate(bodies))
    (tmp_path / "test_leaks.py").write_text(code)
    result = run_tool("pytest", "-p", "no:cacheprovider", "-q", "--rootdir", str(tmp_path), str(tmp_path))
    reported = re.findall(r"ERROR at teardown of test_(\d) _+\nleaked (.+?):", result.stdout)
    assert reported == [(str(number), what) for number, what in enumerate(LEAKS)], result.stdout
    assert f"{len(bodies)} passed, {len(LEAKS)} errors" in result.stdout


def test_test_that_runs_alone_waits_for_others_and_is_not_overtaken(tmp_path: Path) -> None:
    # A copy, with locks of its own: this test has a place itself.
    copy = shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    spec = importlib.util.spec_from_file_location("conftest_copy", copy)
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    order = []

    def take(name: str, *, is_alone: bool) -> None:
        with conftest.place_on_machine(is_alone=is_alone):
            order.append(name)

    alone = threading.Thread(target=take, args=("alone",), kwargs={"is_alone": True})
    late = threading.Thread(target=take, args=("late",), kwargs={"is_alone": False})
    with conftest.place_on_machine(is_alone=False):
        take("beside", is_alone=False)
        alone.start()
        alone.join(0.2)
        late.start()
        late.join(0.2)
        assert order == ["beside"]
    alone.join()
    late.join()
    assert order == ["beside", "alone", "late"]
