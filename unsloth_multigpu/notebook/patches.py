"""Actions for the user that run once in a notebook: log in, answer, mount, upload. All ranks get rank 0's result."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping
from typing import Any

from unsloth_multigpu.patching import Patch

# Called with a description and what rank 0 runs. Every rank gets the result of rank 0, as plain data.
Share = Callable[[str, Callable[[], Any]], Any]
# How the descriptions begin of calls whose result the ranks above 0 use.
VALUE_KINDS = ("userdata.get(", "files.upload(")

_ASKS = "It asks the user, who is asked once; the other ranks read the token from its file."
_FRONT_END = "It speaks to the front end of Colab, which only rank 0 has."
_HUB = "huggingface_hub>=0.24"
_COLAB = "google-colab>=1"
_ONCE = {
    "huggingface_hub._login:login": (_HUB, _ASKS),
    "huggingface_hub._login:logout": (_HUB, _ASKS),
    "huggingface_hub._login:notebook_login": (_HUB, _ASKS),
    "huggingface_hub._login:interpreter_login": (_HUB, _ASKS),
    "google.colab.auth:authenticate_user": (_COLAB, _FRONT_END),
    "google.colab.drive:mount": (_COLAB, _FRONT_END),
    "google.colab.drive:flush_and_unmount": (_COLAB, _FRONT_END),
    "google.colab.files:download": (_COLAB, _FRONT_END),
}


def notebook_patches(share: Share) -> list[Patch]:
    """Patches of what asks the user or the front end.

    Args:
        share: See `Share`.
    """
    patches = [
        Patch(target, supports, functools.partial(_once, share, target), reason, optional=True)
        for target, (supports, reason) in _ONCE.items()
    ]
    for target, wrap in (
        ("google.colab.userdata:get", functools.partial(_value, share, "userdata.get")),
        ("google.colab.files:upload", functools.partial(_files, share, "files.upload")),
    ):
        patches.append(Patch(target, _COLAB, wrap, _FRONT_END, optional=True))
    return patches


def _once(share: Share, target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    module, _, name = target.partition(":")

    def once(*args: Any, **kwargs: Any) -> Any:
        results = []
        # A token that is given to `login` is not written to a file.
        share(
            _call(name, args, kwargs) if module.startswith("google.") else f"{name}()",
            lambda: results.append(original(*args, **kwargs)),
        )
        return results[0] if results else None

    return once


def _value(share: Share, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: share(_call(name, args, kwargs), lambda: original(*args, **kwargs))


def _files(share: Share, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def upload(*args: Any, **kwargs: Any) -> dict[str, bytes]:
        def in_text() -> dict[str, str]:
            return {name: base64.b64encode(data).decode() for name, data in original(*args, **kwargs).items()}

        found = share(_call(name, args, kwargs), in_text)
        return {name: base64.b64decode(text) for name, text in found.items()}

    return upload


def _call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The name of a call with those arguments that are text. Ranks identify the call by it."""
    return f"{name}({', '.join(repr(text) for text in (*args, *kwargs.values()) if isinstance(text, str))})"
