"""A rank of a script that has no line of its own: `python -m unsloth_multigpu.cli.script train.py --args`."""

from __future__ import annotations

import os
import sys
from types import ModuleType


def main() -> None:
    """Enables this rank, and runs the program that `sys.argv` names.

    The program becomes `__main__` as under plain Python: for good, since spawned workers, threads and exit handlers
    look there after its last line, and before torch is imported, since dill keeps what `__main__` was then. The public
    functions of runpy give it back at the last line, and leave `__file__` relative.
    """
    import builtins
    import pkgutil
    import runpy
    from importlib.machinery import SourceFileLoader

    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if is_module else sys.argv[1:]
    path = os.path.abspath(sys.argv[0])
    program = sys.modules["__main__"] = ModuleType("__main__")
    vars(program).update(__builtins__=builtins, __cached__=None, __annotations__={})
    is_archive = not is_module and pkgutil.get_importer(path) is not None  # A folder or a zip file with a __main__.py.
    # `python -m` has put the working directory first, `python -P -m` nothing.
    has_folder = not getattr(sys.flags, "safe_path", False)
    if is_archive:
        sys.path[: int(has_folder)] = [path]
    elif not is_module and has_folder:
        sys.path[0] = os.path.dirname(os.path.realpath(path))

    from unsloth_multigpu.plugin import enable_multi_gpu

    enable_multi_gpu()
    try:
        if is_module or is_archive:
            # What the interpreter itself calls for -m; it runs the module in sys.modules["__main__"].
            run_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]
            run_as_main(sys.argv[0] if is_module else "__main__", alter_argv=is_module)
        else:
            loader = SourceFileLoader("__main__", path)
            vars(program).update(__file__=path, __loader__=loader)
            exec(loader.source_to_code(loader.get_data(path), path), vars(program))
    except Exception as error:
        # As the interpreter ends a program, without the frames below the program's own.
        traceback = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
