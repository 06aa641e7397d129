"""The user's code in a slot: how it gets there, also from a script or a notebook, and what it raises there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.words import gib

logger = get_logger(__name__)

_WARN_BYTES = 2**28
_MAX_DEPTH = 12


def pack(app: Any) -> bytes:
    """Pickles the app: functions of `__main__` travel with what they use of it, others by their module's name.

    By cloudpickle and not by dill, which gives each function globals of its own: what one assigns to a global, another
    one would not see.

    Raises:
        SetupError: An object that is used cannot travel; or cloudpickle is not installed.
    """
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError as missing:
        raise SetupError(
            "Clients run in processes of their own, which needs cloudpickle.",
            hint="pip install cloudpickle",
        ) from missing
    try:
        data: bytes = cloudpickle.dumps(app)
    except Exception as error:
        where, culprit = find_culprit(app)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
        raise SetupError(
            f"The clients' functions cannot be sent to a slot, because of {where}, a {kind}: {error}.",
            hint="Make it inside the function that uses it, or inside model_builder: these run in the slot.",
        ) from error
    if len(data) > _WARN_BYTES:
        logger.warning(
            "the clients' functions take %s with the objects that they use, for every slot: load data and models "
            "inside them",
            gib(len(data), 1),
        )
    return data


def unpack(data: bytes) -> Any:
    """The app, in the slot."""
    import cloudpickle

    return cloudpickle.loads(data)


def find_culprit(value: Any) -> tuple[str, Any]:
    """The object in `value` that cannot be pickled, and where it is: "the global 'lock' of train_fn()"."""
    where, function = "", ""
    seen: set[int] = set()
    while len(seen) < _MAX_DEPTH:
        seen.add(id(value))
        bad = next(((w, v) for w, v in _parts(value) if id(v) not in seen and not _travels(v)), None)
        if bad is None:
            break
        where, value = bad
        if isinstance(value, FunctionType):
            function = f"{value.__qualname__}()"
    return " of ".join(filter(None, (where, function))) or "the ClientApp", value


def _travels(value: Any) -> bool:
    import cloudpickle

    outcome = Outcome()
    with outcome:
        cloudpickle.dumps(value)
    return outcome.error is None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        for kind, names in (("the variable", used.nonlocals), ("the global", used.globals)):
            yield from ((f"{kind} {name!r}", part) for name, part in names.items() if not isinstance(part, ModuleType))
    elif isinstance(value, MethodType):
        yield from (("the object", value.__self__), ("the function", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("the function", value.func), ("the arguments", [*value.args, *value.keywords.values()]))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        yield from ((f".{name}", part) for name, part in vars(value).items())


class Outcome:
    """`with outcome:` holds what its block raised.

    Attributes:
        error: None where the block ended.
    """

    error: BaseException | None = None

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: TracebackType | None) -> bool:
        self.error = error
        # sys.exit() in a client's function ends the client, not the slot. Ctrl-C and the like are passed on.
        return isinstance(error, Exception | SystemExit)

    def __str__(self) -> str:
        """One line."""
        return " ".join(f"{type(self.error).__name__}: {self.error}".split())
