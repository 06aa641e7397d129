"""Runs a script after `enable_multi_gpu()`: `python -m unsloth_multigpu.cli.script_runner train.py --args`.

The process is then the supervisor or a rank. Under a tool such as `verify`, a script that has the call makes it itself.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.logs import tell
from unsloth_multigpu.wire.context import RunContext


def main() -> None:
    """Calls `enable_multi_gpu()`, and runs the program in `sys.argv`.

    The program becomes `__main__` as under plain Python. It stays, because spawned workers, threads and exit handlers
    use it after the last line. It is set before torch is imported, because dill keeps the `__main__` that it finds.
    The public functions of runpy restore `__main__` after the last line and set a relative `__file__`.
    """
    import builtins
    import runpy
    from importlib.machinery import SourceFileLoader

    from unsloth_multigpu.plugin import enable_multi_gpu, is_multi_gpu_enabled, tool_of

    is_followed = tool_of(RunContext.read(os.environ)).is_comparison
    starts_itself = is_followed and calls_enable(sys.argv[1:])
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if is_module else sys.argv[1:]
    path = os.path.abspath(sys.argv[0])
    program = sys.modules["__main__"] = ModuleType("__main__")
    vars(program).update(__builtins__=builtins, __cached__=None, __annotations__={})
    # `python -m` has put the working directory first, `python -P -m` nothing.
    if not is_module and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))

    from unsloth_multigpu.hooks.trainer_patches import followed_train_patch
    from unsloth_multigpu.patching import PatchRegistry

    if is_followed:
        # A call of enable_multi_gpu() in the source may not be reached: then `train()` raises.
        PatchRegistry([followed_train_patch(is_multi_gpu_enabled)]).apply()
    if not starts_itself:
        try:
            enable_multi_gpu()
        except MultiGPUError as error:
            if RunContext.read(os.environ).run_dir is not None:
                raise  # A rank reports it to its supervisor.
            tell(f"error: {error}\n")
            raise SystemExit(error.exit_code) from None
    try:
        if is_module:
            # The interpreter's own function for -m, which runs the module in sys.modules["__main__"].
            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
        else:
            loader = SourceFileLoader("__main__", path)
            vars(program).update(__file__=path, __loader__=loader)
            exec(loader.source_to_code(loader.get_data(path), path), vars(program))
    except Exception as error:  # noqa: BLE001  # Any error of the script ends the process.
        # As the interpreter does, without the frames of this module.
        traceback = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        raise SystemExit(1) from None


def calls_enable(program: Sequence[str]) -> bool:
    """True if the source of a script or module calls `enable_multi_gpu`, and so starts its ranks itself.

    `program` is the script and its arguments, or `-m`, a module and its arguments.
    """
    path = _module_file(program[1]) if program[0] == "-m" else Path(program[0])
    if path is None or not path.is_file():
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # It fails when it runs.
        return False
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any("enable_multi_gpu" in (getattr(f, "attr", None), getattr(f, "id", None)) for f in called)


def _module_file(name: str) -> Path | None:
    """Returns the file that `python -m name` runs, without importing the packages around it."""
    places, origin = [os.getcwd(), *sys.path], None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places, origin = list(spec.submodule_search_locations or []), spec.origin
    # A package runs its __main__.
    return Path(places[0], "__main__.py") if places else Path(origin or "")


if __name__ == "__main__":
    main()
