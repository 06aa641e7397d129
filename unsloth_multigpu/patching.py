"""Patches of other libraries, as data: applied when the target's module is imported, verified, and undone.

Nothing here imports a target's module: a patch waits for the user's import.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal

from wrapt import register_post_import_hook

from unsloth_multigpu.errors import PatchError, VersionError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.versions import check_version

State = Literal["landed", "waiting for import", "absent", "not installed", "undone"]

_log = get_logger(__name__)
_MISSING: Any = object()


@dataclass(eq=False)
class Patch:
    """A replacement for a function of another library, and its state. One `PatchRegistry` applies it, once.

    Attributes:
        target: `module:attribute.path`, such as `transformers.trainer:Trainer.train`; the module that defines the name,
            not a package that re-exports it lazily.
        supports: Requirement on the distribution of the target, such as `transformers>=4.57,<6`.
        wrap: Called in place of the original. Its first argument is the original as a plain function, then come the
            caller's arguments, with `self` or `cls` if there is one.
        reason: Why the target is patched, in one sentence, for docs/seams.md. By default the first line of the
            docstring of `wrap`.
        needs: Parameters of the original that `wrap` relies on.
        optional: The target may be missing in a part of the supported range.
        after: The module whose import defines the function, if it is not the target's own module.
        state: Whether the replacement is in place.
    """

    target: str
    supports: str
    wrap: Callable[..., Any]
    reason: str = ""
    needs: tuple[str, ...] = ()
    optional: bool = False
    after: str | None = None

    def __post_init__(self) -> None:
        if not self.reason:
            text = inspect.getdoc(getattr(self.wrap, "func", self.wrap)) or ""
            self.reason = text.partition("\n")[0]
        self._module, _, self._path = self.target.partition(":")
        self._name = self._path.rpartition(".")[2]
        self.awaited = self.after or self._module
        self.state: State = "waiting for import"
        self._holder: Any = None
        # The old and the new value of `vars(holder)[name]`, and the new one without its staticmethod or classmethod.
        self._before: Any = None
        self._installed: Any = None
        self._function: Any = None
        self._num_active = 0  # Calls of `_function` that have not returned.

    def __reduce__(self) -> tuple[Any, ...]:
        # `datasets` hashes a mapped function with everything that it refers to, such as methods of a tokenizer that we
        # wrap. Pickling the name alone keeps the hash equal on all ranks.
        return str, (self.target,)

    def check_installed(self) -> None:
        """Checks the version of the distribution, and that the module exists."""
        row = check_version(self.supports)
        if row.installed is None:
            self.state = "not installed"
        elif not row.ok:
            raise VersionError(
                f"{row.name} {row.installed} is installed, but {self.target} is known for {row.supported}.",
                hint=f'pip install "{self.supports}"',
            )
        elif self._module not in sys.modules and _find_spec(self._module) is None:
            self._record_absence()

    def land(self) -> None:
        """Replaces the function. Its module is imported."""
        self._holder, raw = self._find()
        if raw is _MISSING:
            self._record_absence()
            return
        is_wrapped = isinstance(raw, (staticmethod, classmethod))
        original = raw.__func__ if is_wrapped else raw
        # inspect counts a `partialmethod` or `cached_property` as a routine.
        if not (inspect.isroutine(original) and callable(original)):
            raise self._mismatch(f"it is not a function but {type(raw).__name__}")
        if missing := [name for name in self.needs if name not in inspect.signature(original).parameters]:
            raise self._mismatch(f"it has no parameter {', '.join(missing)}")
        self._function = self._switch(original)
        self._installed = type(raw)(self._function) if is_wrapped else self._function
        self._before = vars(self._holder).get(self._name, _MISSING)  # Missing if `raw` is inherited.
        setattr(self._holder, self._name, self._installed)
        self.state = "landed"
        _log.debug("patch=%s state=landed", self.target)

    def remove(self, state: State) -> None:
        """Restores the original. Sets the state, unless the patch is absent, not installed or undone."""
        # Only if our function is still there: otherwise the wrapper of another library would be lost.
        if self.state == "landed" and vars(self._holder).get(self._name) is self._installed:
            if self._before is _MISSING:
                delattr(self._holder, self._name)
            else:
                setattr(self._holder, self._name, self._before)
        if self.state in ("landed", "waiting for import"):
            self.state = state

    def verify(self) -> None:
        """See `PatchRegistry.verify`."""
        awaited = sys.modules.get(self.awaited)
        if awaited is None or _is_initializing(awaited) or self.state in ("absent", "undone"):
            return
        raw = self._find()[1]
        if self.state != "landed":
            raise PatchError(
                f"{self._module} is imported, but the patch of {self._path} is not in it ({self.state}).",
                hint="Import it in the ordinary way, from an installed distribution, after enable_multi_gpu().",
            )
        if not self._num_active and not _leads_to(raw, self._function):
            raise PatchError(
                f"{self.target} was replaced after it was patched, by {_describe(raw)}, which does not call the "
                "patched function.",
                hint="Let it call the function that it replaces, and apply functools.wraps; or replace it before "
                "enable_multi_gpu().",
            )

    def _find(self) -> tuple[Any, Any]:
        """Returns (holder, raw descriptor or _MISSING). Binds nothing and loads no lazy attribute."""
        # From sys.modules, not the argument of an import hook: a lazy package replaces itself there during its import.
        holder, raw = None, sys.modules.get(self._module, _MISSING)
        for name in self._path.split("."):
            holder, raw = raw, _MISSING if raw is _MISSING else inspect.getattr_static(raw, name, _MISSING)
        return holder, raw

    def _record_absence(self) -> None:
        if not self.optional:
            raise self._mismatch("there is no such target")
        self.state = "absent"

    def _mismatch(self, what: str) -> PatchError:
        row = check_version(self.supports)
        return PatchError(
            f"{self.target} in {row.name} {row.installed}: {what}.",
            hint=f"Install another {row.name} within {row.supported}, and report this version.",
        )

    def _switch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` keeps the name, and by `__wrapped__` the signature and the source, which Unsloth reads.
        # The state is checked in each call, because copies (on instances, in other wrappers) outlive undo().
        @functools.wraps(original)
        def switch(*args: Any, **kwargs: Any) -> Any:
            self._num_active += 1
            try:
                if self.state != "landed":
                    return original(*args, **kwargs)
                return self.wrap(original, *args, **kwargs)
            finally:
                self._num_active -= 1

        return switch


class PatchRegistry:
    """Applies, verifies and undoes a set of patches. It is applied once."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches = list(patches)

    def apply(self) -> None:
        """Applies every patch: now if its module is imported, else during the import.

        Versions and the existence of the modules are checked first, so that an error leaves everything untouched.
        If a patch fails during a later import, that import raises, and so does every further try.

        Raises:
            VersionError: An installed distribution is older than its range.
            PatchError: A target is missing or has another signature.
        """
        for patch in self._patches:
            patch.check_installed()
        try:
            for name in dict.fromkeys(patch.awaited for patch in self._patches if patch.state == "waiting for import"):
                self._land_when_imported(name)
        except BaseException:
            self.undo()
            raise

    def verify(self) -> None:
        """Checks that each target is our function, or wraps it.

        Costs a few dictionary look-ups per patch. A wrapper that refers to our function, in `__wrapped__` or in a
        closure, is trusted to call it. A function of ours that is running needs no check.

        Raises:
            PatchError: A target was replaced, or its module is imported without the patch.
        """
        for patch in self._patches:
            patch.verify()

    def undo(self) -> None:
        """Removes the patches in reverse order and cancels those that wait for an import. May be called repeatedly.

        Where other code has wrapped or copied our function, it stays and only calls the original.
        """
        for patch in reversed(self._patches):
            patch.remove("undone")

    def states(self) -> dict[str, State]:
        """Returns the state of each patch by its target. They are meaningful after `apply()`."""
        return {patch.target: patch.state for patch in self._patches}

    def _land_when_imported(self, name: str) -> None:
        if (module := sys.modules.get(name)) is not None:
            if _is_initializing(module):
                raise PatchError(f"{name} is just being imported.", hint="Call enable_multi_gpu() before that import.")
            self._land(name)
            return

        def hook(_module: ModuleType) -> None:
            try:
                self._land(name)
            except BaseException:
                # wrapt drops a hook before it calls it, and many libraries catch import errors and try again: the next
                # try would succeed without the patches. importlib removes a module whose import failed in any case.
                # Removing it here, earlier, allows registering the hook again.
                sys.modules.pop(name, None)
                register_post_import_hook(hook, name)
                raise

        register_post_import_hook(hook, name)

    def _land(self, name: str) -> None:
        """Applies all patches of one module or none. Patches of other modules stay, so that `verify()` is reached."""
        patches = [patch for patch in self._patches if patch.awaited == name and patch.state == "waiting for import"]
        try:
            for patch in patches:
                patch.land()
        except BaseException:
            for patch in reversed(patches):
                patch.remove("waiting for import")
            raise


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(vars(module).get("__spec__"), "_initializing", False))


def _find_spec(name: str) -> ModuleSpec | None:
    """Like `importlib.util.find_spec`, but does not import the parent packages."""
    parent = name.rpartition(".")[0]
    if not parent:
        return find_spec(name)
    if parent in sys.modules:
        locations = getattr(sys.modules[parent], "__path__", None)
    else:
        locations = getattr(_find_spec(parent), "submodule_search_locations", None)
    return PathFinder.find_spec(name, locations) if locations else None


def _leads_to(raw: Any, function: Any) -> bool:
    """True if `raw` is `function`, or refers to it by `__wrapped__`, its closure or a partial, at any depth."""
    seen: set[int] = set()
    found = [raw]
    while found:
        link = found.pop()
        if link is function:
            return True
        if id(link) in seen:
            continue
        seen.add(id(link))
        if isinstance(link, (staticmethod, classmethod, MethodType)):
            found.append(link.__func__)
        elif isinstance(link, functools.partial):
            found.append(link.func)
        elif isinstance(link, FunctionType):
            found.append(vars(link).get("__wrapped__"))
            for cell in link.__closure__ or ():
                with suppress(ValueError):  # Raised while the variable of the cell has no value.
                    found.append(cell.cell_contents)
    return False


def _describe(raw: Any) -> str:
    # The file comes from the code object, because `functools.wraps` copies name and module.
    function = getattr(raw, "__func__", raw)
    code = getattr(function, "__code__", None)
    if raw is _MISSING or code is None:
        return "nothing" if raw is _MISSING else repr(raw)
    return f"{function.__module__}.{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
