"""The one patching mechanism. A patch is data: it is applied when its target is imported, verified, and undone.

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


@dataclass(frozen=True)
class Patch:
    """A function of another library that we steer.

    Attributes:
        target: `module:attribute.path`, such as `transformers.trainer:Trainer.train`; the module that holds the name
            itself, not a package that hands it on lazily.
        supports: Requirement on the distribution that holds the target, such as `transformers>=4.57,<6`.
        wrap: Called in its place, as `part.Override` is: with the original as a plain function, then what the caller
            gave (`self` or `cls` first where it has one).
        reason: Why the target is touched, in one sentence, for docs/seams.md.
        needs: Parameters of the original that `wrap` relies on.
        optional: The target may be missing in a part of the supported range.
        after: The module whose import puts the function there, where that is another one than the target's.
    """

    target: str
    supports: str
    wrap: Callable[..., Any]
    reason: str
    needs: tuple[str, ...] = ()
    optional: bool = False
    after: str | None = None


@dataclass(frozen=True)
class PatchRow:
    """One patch, and where it is."""

    target: str
    supports: str
    reason: str
    state: State


class PatchRegistry:
    """Applies, verifies and undoes patches, once: after `undo()` a new registry is made."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._seams = [_Seam(patch) for patch in patches]
        self._is_applied = False

    def apply(self) -> None:
        """Lands every patch: at once where its module is imported, else when it will be.

        Versions and the existence of the modules are checked first, so that an error leaves everything untouched.
        A patch that fails in a later import makes that import raise, this time and every time.

        Raises:
            VersionError: A distribution is installed in a version below its range.
            PatchError: A target is missing or has another shape, or this registry was applied before.
        """
        if self._is_applied:
            raise PatchError("apply() was called twice on one PatchRegistry.", hint="Make a new PatchRegistry.")
        self._is_applied = True
        for seam in self._seams:
            seam.check_installed()
        try:
            for name in dict.fromkeys(seam.awaited for seam in self._seams if seam.state == "waiting for import"):
                self._land_when_imported(name)
        except BaseException:
            self.undo()
            raise

    def verify(self) -> None:
        """Checks that each target still leads to our function: it is there, or what is there holds it.

        Costs a few dictionary look-ups per patch. What holds ours, in `__wrapped__` or in a closure, is trusted to call
        it. A patch whose function is being called needs no look: it was reached.

        Raises:
            PatchError: A target was replaced, or its module is imported without the patch.
        """
        for seam in self._seams:
            seam.verify()

    def undo(self) -> None:
        """Takes the patches off in reverse order; those still waiting never land. Harmless when called again.

        If other code wrapped our function, or kept a copy of it, ours stays there and only passes calls through.
        """
        for seam in reversed(self._seams):
            seam.remove("undone")

    def rows(self) -> list[PatchRow]:
        """Returns one row per patch in the order given; states are meaningful after `apply()`."""
        return [PatchRow(s.patch.target, s.patch.supports, s.patch.reason, s.state) for s in self._seams]

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
                # wrapt forgets a hook before it calls it, and many libraries catch errors of imports and try again:
                # the next try would pass without the patches. importlib drops a module whose import failed, so
                # dropping it here changes nothing but lets the hook be registered again.
                sys.modules.pop(name, None)
                register_post_import_hook(hook, name)
                raise

        register_post_import_hook(hook, name)

    def _land(self, name: str) -> None:
        """Lands all patches of one module or none. Other modules keep theirs, so that `verify()` is still reached."""
        seams = [seam for seam in self._seams if seam.awaited == name and seam.state == "waiting for import"]
        try:
            for seam in seams:
                seam.land()
        except BaseException:
            for seam in reversed(seams):
                seam.remove("waiting for import")
            raise


class _Seam:
    """One patch with its place: what stood in `vars(holder)[name]` before, and what we put there."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.module, _, self.path = patch.target.partition(":")
        self.awaited = patch.after or self.module
        self.state: State = "waiting for import"
        self.holder: Any = None
        self.name = self.path.rpartition(".")[2]
        self.before: Any = None
        self.installed: Any = None
        self.function: Any = None  # `installed` without its staticmethod or classmethod.
        self.num_active = 0  # Calls of `function` that have not returned.

    def __reduce__(self) -> tuple[Any, ...]:
        # `datasets` hashes what a mapped function holds, down to methods of a tokenizer that we wrap. Seen from there
        # a patch is its name: the hash must neither fail nor differ from rank to rank.
        return str, (self.patch.target,)

    def check_installed(self) -> None:
        row = check_version(self.patch.supports)
        if row.installed is None:
            self.state = "not installed"
        elif not row.ok:
            raise VersionError(
                f"{row.name} {row.installed} is installed, but {self.patch.target} is known for {row.supported}.",
                hint=f'pip install "{self.patch.supports}"',
            )
        elif self.module not in sys.modules and _find_spec(self.module) is None:
            self._record_absence()

    def land(self) -> None:
        self.holder, raw = self._find()
        if raw is _MISSING or (self.patch.optional and self._is_alias()):
            self._record_absence()
            return
        is_wrapped = isinstance(raw, (staticmethod, classmethod))
        original = raw.__func__ if is_wrapped else raw
        # A class does not pass `self` to a callable that is not a descriptor, but it would pass it to our function.
        is_bindable = not isinstance(self.holder, type) or hasattr(type(raw), "__get__")
        if not callable(original) or isinstance(original, type) or not is_bindable:
            raise self._misfit(f"it is not a function but {type(raw).__name__}")
        if missing := [name for name in self.patch.needs if name not in inspect.signature(original).parameters]:
            raise self._misfit(f"it has no parameter {', '.join(missing)}")
        self.function = self._switch(original)
        self.installed = type(raw)(self.function) if is_wrapped else self.function
        self.before = vars(self.holder).get(self.name, _MISSING)  # Missing where `raw` is inherited.
        setattr(self.holder, self.name, self.installed)
        self.state = "landed"
        _log.debug("patch=%s state=landed", self.patch.target)

    def remove(self, state: State) -> None:
        # Remove only our own function: restoring under another library's wrapper would remove that wrapper, too.
        if self.state == "landed" and vars(self.holder).get(self.name) is self.installed:
            if self.before is _MISSING:
                delattr(self.holder, self.name)
            else:
                setattr(self.holder, self.name, self.before)
        if self.state in ("landed", "waiting for import"):
            self.state = state

    def verify(self) -> None:
        awaited = sys.modules.get(self.awaited)
        if awaited is None or _is_initializing(awaited) or self.state in ("absent", "undone"):
            return
        raw = self._find()[1]
        if self.state != "landed":
            raise PatchError(
                f"{self.module} is imported, but the patch of {self.path} is not in it ({self.state}).",
                hint="Import it in the ordinary way, from an installed distribution, after enable_multi_gpu().",
            )
        if not self.num_active and not _leads_to(raw, self.function):
            raise PatchError(
                f"{self.patch.target} was replaced after it was patched: {_describe(raw)} stands there now, and does "
                "not call what it found.",
                hint="Let it call the function that it found there, and say so by functools.wraps; or put it there "
                "before enable_multi_gpu().",
            )

    def _find(self) -> tuple[Any, Any]:
        """Returns (holder, raw descriptor or _MISSING). Binds nothing and wakes no lazy attribute."""
        # Here and not what an import hook is given: a lazy package puts another object there while it is executed.
        holder, raw = None, sys.modules.get(self.module, _MISSING)
        for name in self.path.split("."):
            holder, raw = raw, _MISSING if raw is _MISSING else inspect.getattr_static(raw, name, _MISSING)
        return holder, raw

    def _is_alias(self) -> bool:
        # A renamed class keeps its old name as an alias. The patch of the new name covers both.
        return isinstance(self.holder, type) and self.holder.__name__ != self.path.split(".")[-2]

    def _record_absence(self) -> None:
        if not self.patch.optional:
            raise self._misfit("there is no such target")
        self.state = "absent"

    def _misfit(self, what: str) -> PatchError:
        row = check_version(self.patch.supports)
        return PatchError(
            f"{self.patch.target} in {row.name} {row.installed}: {what}.",
            hint=f"Install another {row.name} within {row.supported}, and report this version.",
        )

    def _switch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` keeps name and dictionary, and by `__wrapped__` the signature and the source that Unsloth reads.
        # The state is asked at each call since copies (on instances, in others' wrappers) outlive undo().
        @functools.wraps(original)
        def switch(*args: Any, **kwargs: Any) -> Any:
            self.num_active += 1
            try:
                if self.state != "landed":
                    return original(*args, **kwargs)
                return self.patch.wrap(original, *args, **kwargs)
            finally:
                self.num_active -= 1

        return switch


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(vars(module).get("__spec__"), "_initializing", False))


def _find_spec(name: str) -> ModuleSpec | None:
    """Finds a module on disk. Unlike importlib's, which imports the parents of a submodule, this imports nothing."""
    parent = name.rpartition(".")[0]
    if not parent:
        return find_spec(name)
    if parent in sys.modules:
        locations = getattr(sys.modules[parent], "__path__", None)
    else:
        locations = getattr(_find_spec(parent), "submodule_search_locations", None)
    return PathFinder.find_spec(name, locations) if locations else None


def _leads_to(raw: Any, function: Any) -> bool:
    """True if `raw` is `function`, or wraps something that is: by `__wrapped__`, in its closure or as a partial."""
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
                with suppress(ValueError):  # Empty while the name that it stands for has no value.
                    found.append(cell.cell_contents)
    return False


def _describe(raw: Any) -> str:
    # The code knows where it was written; `functools.wraps` makes name and module lie.
    function = getattr(raw, "__func__", raw)
    code = getattr(function, "__code__", None)
    if raw is _MISSING or code is None:
        return "nothing" if raw is _MISSING else repr(raw)
    return f"{function.__module__}.{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
