"""The house rules that a program can check. Every check is also shown a violation, so that none passes by accident."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unsloth_multigpu.accelerator import CHOOSERS, CPU_BACKEND, HIDDEN, KINDS, WITHOUT_GROUP

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "unsloth_multigpu"
MODULES = sorted(PACKAGE.rglob("*.py"))
OWN_FILES = sorted(
    path for folder in ("unsloth_multigpu", "tests", "examples") for path in (ROOT / folder).rglob("*.py")
)
# One concept a file. One with more lines says in its docstring why, in a line that begins like this.
MAX_MODULE_LINES = 500
LONG_BECAUSE = "Long because"
MAX_FUNCTION_LINES = 60

# The layers: one row for each folder, and for each file that lies in none. Imports go down only. docs/architecture.md
# shows this table; a folder that nothing names is a failure.
LAYERS = {
    "errors": 0,
    "logs": 0,
    "versions": 0,
    "option_type": 0,
    "option_file": 0,
    "strategy": 0,
    "options": 0,
    "report": 0,
    "accelerator": 0,
    "library": 0,
    "words": 0,
    "wire": 1,
    "part": 2,
    "patching": 2,
    "seam": 2,
    "overview": 2,
    "tool": 2,
    "group": 3,
    "launch": 4,
    "deal": 4,
    "step": 5,
    "checkpoint": 6,
    "shard": 6,
    "strategies": 6,
    "train": 7,
    "recorders": 7,
    "hooks": 8,
    "legacy": 8,
    "start": 9,
    "program": 9,
    "session": 9,
    "notebook": 10,
    "plugin": 11,
    "plain": 12,
    "cli": 12,
    "federated": 13,
    "tools": 14,
    "__main__": 15,
    "__init__": 16,
}
DATA, PURE, RUNTIME, EDGES, FRONT, OUTSIDE, FACE = 0, range(1, 3), range(3, 8), 8, range(9, 13), range(13, 16), 16
# By its docstring a module of the runtime says that it needs no torch, so that all above may import it: "Pure.", "A
# pure decision", "Needs no torch."
PURE_WORDS = re.compile(r"\bpure\b|\bno torch\b", re.IGNORECASE)
# Modules of edges and of the front that need the runtime. They are imported inside functions, and by each other.
LATE = {f"notebook.{name}" for name in ("display", "kernel_share", "monitor", "recovery", "shell", "worker")}
LATE |= {"legacy.serial", "notebook.cell_program", "notebook.kernel_start", "plain.plain_loop"}
LIGHT = {"packaging", "wrapt", "psutil"}
# Read files of options, which few users have: inside functions, where there is one. dill comes with datasets.
PARSERS = {"yaml", "tomli", "dill"}
HEAVY = {"torch", "numpy", "transformers", "trl", "peft", "accelerate", "datasets", "unsloth", "unsloth_zoo"}

TOOLS = {path.parent.name for path in (PACKAGE / "tools").glob("*/__init__.py")}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def room(module: str) -> str:
    """The folder of the package that a module lies in, or the module where it lies in none."""
    return module.split(".")[0]


def layer_of(module: str) -> int | None:
    """Returns None for a module whose folder is not in `LAYERS`."""
    return LAYERS.get(room(module))


@functools.cache
def marks_of(module: str, source: str | None = None) -> set[str]:
    """Returns "pure" and "late", as far as they hold."""
    if source is None:
        path = PACKAGE / (module.replace(".", "/") + ".py")
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
    is_pure = PURE_WORDS.search(ast.get_docstring(ast.parse(source)) or "")
    return {mark for mark, holds in (("pure", is_pure), ("late", module in LATE)) if holds}


def imports(node: ast.AST, module: str, where: str = "top") -> Iterator[tuple[str, str, int]]:
    """Yields (dotted name, where, line); `where` is "top", "inside" (a function) or "typing" (never executed)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, where, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = ["unsloth_multigpu", *module.split(".")][: -child.level] if child.level else []
            base = ".".join([*package, *filter(None, [child.module])])
            yield from ((f"{base}.{alias.name}", where, child.lineno) for alias in child.names)
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from imports(ast.Module(child.body, []), module, "typing")
            yield from imports(ast.Module(child.orelse, []), module, where)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and where == "top":
            yield from imports(child, module, "inside")
        else:
            yield from imports(child, module, where)


@functools.cache
def own_module(name: str) -> str:
    """`unsloth_multigpu.errors.ConfigError` -> `errors`; what is no module of ours is an attribute of the face."""
    parts = name.split(".")[1:]
    known = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    files = [module for module in known if (PACKAGE / module.replace(".", "/")).with_suffix(".py").exists()]
    return next((module for module in [*files, *known] if layer_of(module) is not None), "__init__")


def layer_violations(source: str, module: str) -> list[str]:
    layer, marks = layer_of(module), marks_of(module, source)
    if layer is None:
        return [f"{module}: in no layer; add its folder to LAYERS"]
    found = []
    for name, where, line in imports(ast.parse(source), module):
        root = name.split(".")[0]
        if root == "unsloth_multigpu":
            target = own_module(name)
            if not is_allowed(module, layer, marks, target, where):
                found.append(f"{module}:{line}: layer {layer} imports {name} of layer {layer_of(target)} ({where})")
        elif root not in sys.stdlib_module_names and not third_party_is_allowed(root, layer, marks, where):
            found.append(f"{module}:{line}: layer {layer} imports {name} ({where})")
    return found


def is_allowed(module: str, layer: int, marks: set[str], target: str, where: str) -> bool:
    its, its_marks = layer_of(target), marks_of(target)
    assert its is not None
    if module.endswith("__init__") and layer != FACE and room(module) == room(target):
        return where != "top" or layer in OUTSIDE  # It runs before every module of its folder.
    if "late" in its_marks and where == "top" and "late" not in marks:
        return False
    if where == "typing":
        return True  # A type may be named from below. Nothing is imported.
    if its > layer or (its == layer and room(target) != room(module) and not is_in_root(module, target)):
        return False
    if "pure" in its_marks:
        return True
    if "pure" in marks and layer not in OUTSIDE:
        return its <= max(PURE) or (room(target) == room(module) and where != "top")
    if layer in (EDGES, *FRONT) and "late" not in marks:
        is_neighbour = room(target) == room(module) and room(module) != "hooks"
        return where == "inside" or its <= max(PURE) or is_neighbour or (layer in FRONT and its in FRONT)
    return layer != FACE or where == "inside"


def is_in_root(*modules: str) -> bool:
    """Files that lie in no folder, of one layer, build on each other."""
    return all("." not in module for module in modules)


def third_party_is_allowed(root: str, layer: int, marks: set[str], where: str) -> bool:
    if where == "typing":
        return True
    if root in LIGHT:
        return where == "inside" or DATA < layer < FACE
    if root in PARSERS:
        return where == "inside"
    if ("pure" in marks and layer not in OUTSIDE) or layer <= max(PURE):
        return False
    if where == "inside":
        return layer != FACE
    if "late" in marks and root in ("IPython", "traitlets"):
        return True  # A worker of a notebook.
    return (layer in (*RUNTIME, *OUTSIDE) or "late" in marks) and root in ("torch", "numpy", "flwr")


def tool_violations(source: str, module: str) -> list[str]:
    """What names another tool than its own; the command names all."""
    own = module.split(".")[1] if module.startswith("tools.") else None
    tree = ast.parse(source)
    named = [(name, line) for name, _, line in imports(tree, module)]
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    # Modules are also started, or attached, by their name.
    named += [(n.value, n.lineno) for n in texts if re.fullmatch(r"unsloth_multigpu\.tools\.[\w.:]+", n.value)]
    found = [(name.replace(":", ".").split("."), line) for name, line in named]
    return [
        f"{module}:{line}: names the tool {parts[2]}"
        for parts, line in found
        if parts[:2] == ["unsloth_multigpu", "tools"] and parts[2:3] != [own] and "".join(parts[2:3]) in TOOLS
        if module != "__main__"
    ]


def style_violations(source: str, module: str) -> list[str]:
    """Length and emoji; ruff has the other rules of style."""
    lines = source.splitlines()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    says_why = any(re.match(rf"{LONG_BECAUSE} \w", line) for line in docstring.splitlines())
    found = [] if len(lines) <= MAX_MODULE_LINES or says_why else [f"{len(lines)} lines, and no {LONG_BECAUSE!r}"]
    found += [f"emoji in line {n}" for n, line in enumerate(lines, 1) if has_emoji(line)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > MAX_FUNCTION_LINES:
            found.append(f"{node.name} has {code_lines(node)} lines")
    return [f"{module}: {fact}" for fact in found]


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which may be as long as it needs."""
    length = (node.end_lineno or 0) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return length
    docstring = node.body[0]
    return length - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def has_emoji(text: str) -> bool:
    return re.search("[\u2600-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff]", text) is not None


def run_tool(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=280
    )


# Words that only a few modules may have.
RESERVED = (
    # Variables by which a supervisor tells its ranks about the run. All others know the run from its context.
    (re.compile(r"\bENV_(?:RUN_DIR|RUN|TOOL)\b"), {"options", "wire.context"}),
    # Imports by a string, which may be computed, so that `imports` cannot see what is loaded: public names are loaded
    # on first access, and a check imports each installed library.
    (re.compile(r"\b(?:import_module|__import__|resolve_name)\b"), {"__init__", "tools.doctor.patch_check"}),
)


def word_violations(source: str, module: str) -> list[str]:
    return [f"{module}: {word}" for words, owners in RESERVED if module not in owners for word in words.findall(source)]


# `accelerator` alone knows which kinds there are. "cuda" stands for itself where something is of CUDA only.
OF_ACCELERATORS = {
    CPU_BACKEND,
    WITHOUT_GROUP,
    *CHOOSERS,
    *HIDDEN,
    *(KINDS.keys() - {"cuda"}),
    *(kind.backend for kind in KINDS.values()),
}


def accelerator_violations(source: str, module: str) -> list[str]:
    """Texts that are the name of a kind of accelerator, of its backend, or of a variable that chooses devices."""
    texts = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [f"{module}:{n.lineno}: {n.value}" for n in texts if n.value in OF_ACCELERATORS and module != "accelerator"]


LONG = "x = 1\n" * MAX_MODULE_LINES


@pytest.mark.parametrize(
    ("violations", "module", "source"),
    [
        (layer_violations, "utils", ""),
        (layer_violations, "errors", "from unsloth_multigpu.patching import Patch"),
        (layer_violations, "errors", "def f():\n    import torch"),
        (layer_violations, "launch.__init__", "from unsloth_multigpu.launch import launcher"),
        (layer_violations, "wire.identity", "from ..group.manager import DDPManager"),
        (layer_violations, "deal.plan", '"""Plans. Pure."""\nimport torch'),
        (layer_violations, "deal.plan", '"""Plans. Pure."""\nfrom unsloth_multigpu.step.feed import StepFeed'),
        (layer_violations, "group.manager", "import transformers"),
        (layer_violations, "train.trainer", "from unsloth_multigpu import enable_multi_gpu"),
        (layer_violations, "train.trainer", "def f():\n    from unsloth_multigpu.legacy.serial import SerialTrainer"),
        (layer_violations, "hooks.trainer_patches", "import unsloth_multigpu.train.trainer"),
        (layer_violations, "hooks.trainer_patches", "from . import saving"),
        (layer_violations, "notebook.kernel", "from unsloth_multigpu.notebook.recovery import Trainings"),
        (word_violations, "plugin", "x = importlib.import_module(f'unsloth_multigpu.tools.{name}')"),
        (layer_violations, "plugin", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
        (layer_violations, "cli.command", "def f():\n    from unsloth_multigpu.tools.doctor import COMMAND"),
        (layer_violations, "__init__", "from .plugin import enable_multi_gpu"),
        (word_violations, "launch.rank", "x = os.environ[ENV_RUN_DIR]"),
        (style_violations, "plugin", "x = '\U0001f680'"),
        (style_violations, "plugin", f"{LONG}x = 1"),
        (style_violations, "plugin", f'"""A fact. Long because it is."""\n{LONG}'),
        (style_violations, "plugin", f'"""A fact.\n\nLong because\n"""\n{LONG}'),
        (style_violations, "plugin", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (tool_violations, "tools.script_program", "def f():\n    from unsloth_multigpu.tools import verify"),
        (tool_violations, "tools.forecast.forecast_command", "from ..verify.run import run_script"),
        (tool_violations, "launch.rank", "run('unsloth_multigpu.tools.bench.bench_worker')"),
        (accelerator_violations, "launch.rank", "for kind in ('cuda', 'xpu'): f(kind)"),
        (accelerator_violations, "launch.rank", "backend = 'nccl' if device == 'cuda' else other"),
        (accelerator_violations, "launch.rank", "os.environ['CUDA_VISIBLE_DEVICES'] = ''"),
    ],
)
def test_check_catches_a_planted_violation(
    violations: Callable[[str, str], list[str]], module: str, source: str
) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("violations", "module", "source"),
    [
        (layer_violations, "versions", "def f():\n    from packaging.version import Version"),
        (layer_violations, "group.manager", "import torch\nfrom .waits import x\ndef f():\n    import transformers"),
        (
            layer_violations,
            "hooks.saving",
            "if TYPE_CHECKING:\n    from unsloth_multigpu.group.manager import DDPManager",
        ),
        (layer_violations, "cli.command", "def f():\n    from unsloth_multigpu import plugin"),
        (layer_violations, "plugin", "from unsloth_multigpu.session import Session"),
        (layer_violations, "launch.a_file_of_tomorrow", "import torch"),
        (layer_violations, "tools.bench.arm", "from unsloth_multigpu.federated.server import FederatedServer"),
        (word_violations, "wire.context", "x = os.environ[ENV_RUN_DIR]"),
        (word_violations, "tools.doctor.patch_check", "importlib.import_module(name)"),
        (style_violations, "plugin", 'def f():\n    """' + "A line.\n" * MAX_FUNCTION_LINES + '    """\n    return 1'),
        (style_violations, "plugin", f'"""A table.\n\nLong because it has a row for each option.\n"""\n{LONG}'),
        (tool_violations, "tools.verify.verify_command", "from unsloth_multigpu.tools.verify import run"),
        (accelerator_violations, "accelerator", "dist.new_group(backend='gloo')"),
    ],
)
def test_check_lets_the_allowed_pass(violations: Callable[[str, str], list[str]], module: str, source: str) -> None:
    assert violations(source, module) == []


@pytest.mark.parametrize(
    "violations",
    [layer_violations, word_violations, style_violations, tool_violations, accelerator_violations],
    ids=lambda check: check.__name__,
)
def test_modules_keep_the_rule(violations: Callable[[str, str], list[str]]) -> None:
    assert len(MODULES) > 100
    assert [fact for path in MODULES for fact in violations(path.read_text(encoding="utf-8"), module_name(path))] == []


def test_no_two_files_have_one_name() -> None:
    names = [path.name for path in MODULES if path.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_texts_hold_no_emoji() -> None:
    texts = [*OWN_FILES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    assert [str(path) for path in texts if has_emoji(path.read_text(encoding="utf-8"))] == []


def test_ruff_finds_nothing() -> None:
    for command in (["check"], ["format", "--check"]):
        result = run_tool("ruff", *command)
        assert result.returncode == 0, result.stdout + result.stderr


PLANTED = f"""import os
def f():
    global X
    X = 1
    try:
        print(X)  # {"x" * 120}
    except Exception:
        pass
"""


def test_ruff_catches_planted_violations() -> None:
    result = run_tool("ruff", "check", "--stdin-filename", "unsloth_multigpu/planted.py", "-", stdin=PLANTED)
    assert {"F401", "PLW0603", "T201", "BLE001", "E501"} <= set(re.findall(r"\b[A-Z]+\d+\b", result.stdout))


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


def import_violations(folder: Path, most: int = 20) -> list[str]:
    """Imports the package that lies in `folder` in fresh interpreters; the quickest of up to `most` is its time."""
    command = [sys.executable, "-c", IMPORT_PROBE]
    runs: list[dict[str, Any]] = []
    # On a busy machine most of them wait for a core.
    while len(runs) < most and not any(run["elapsed_s"] < 0.1 for run in runs):
        done = subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=60)
        runs.append(json.loads(done.stdout))
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
        ("import time; time.sleep(0.11)", "takes 0."),
    ],
)
def test_import_check_catches_a_planted_violation(tmp_path: Path, source: str, fact: str) -> None:
    (tmp_path / "unsloth_multigpu").mkdir()
    (tmp_path / "unsloth_multigpu" / "__init__.py").write_text(source)
    assert fact in " ".join(import_violations(tmp_path, 3))


LEAKS = {
    "a variable": "import os; os.environ['RANK'] = '7'",
    "a thread": "import threading, time; threading.Thread(target=time.sleep, args=(5,)).start()",
    "a process": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
    "a process group": "import torch.distributed as d; d.init_process_group('gloo', rank=0, world_size=1, "
    "store=d.HashStore())",
}


def test_leaks_fail_the_test_that_leaves_them(tmp_path: Path) -> None:
    conftest, grace = (ROOT / "tests" / "conftest.py").read_text(), "GRACE_S = 10.0 "
    assert grace in conftest
    (tmp_path / "conftest.py").write_text(conftest.replace(grace, "GRACE_S = 1.0 "))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    bodies = [*LEAKS.values(), "pass"]
    code = "".join(f"def test_{number}():\n    {body}\n" for number, body in enumerate(bodies))
    (tmp_path / "test_leaks.py").write_text(code)
    result = run_tool("pytest", "-p", "no:cacheprovider", "-q", "--rootdir", str(tmp_path), str(tmp_path))
    reported = re.findall(r"ERROR at teardown of test_(\d) _+\nleaked (.+?):", result.stdout)
    assert reported == [(str(number), what) for number, what in enumerate(LEAKS)], result.stdout
    assert f"{len(bodies)} passed, {len(LEAKS)} errors" in result.stdout
