"""What nodes tell each other of a rendezvous, as JSON: torch elastic would unpickle whatever lies in an open store."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)


class PlainStateBackend(RendezvousBackend):
    """Stands before a backend of torch's. What torch unpickles was pickled in this process.

    The store has no authentication: who reaches its port can still disturb the run, but execute nothing.

    Args:
        backend: Keeps the state's bytes where all nodes find them.
    """

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        """Name of the backend behind."""
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Token] | None:
        """The pickled state and its version, None before the first.

        Raises:
            RendezvousStateError: What is stored is no state.
        """
        found = self._backend.get_state()
        return None if found is None else (_pickled(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Stores a pickled state of this process, if `token` is still the latest version.

        Returns:
            The state that is stored now, its version, and whether it is the one given.

        Raises:
            RendezvousStateError: What is stored is no state.
        """
        plain = json.dumps({name: _encode(value) for name, value in vars(pickle.loads(state)).items()})
        found = self._backend.set_state(plain.encode(), token)
        return None if found is None else (_pickled(found[0]), found[1], found[2])


def _pickled(plain: bytes) -> bytes:
    state = _RendezvousState()
    try:
        values = {name: _decode(value) for name, value in json.loads(plain).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RendezvousStateError(f"The rendezvous state in the store cannot be read: {error}") from error
    if values.keys() != vars(state).keys():
        raise RendezvousStateError("The rendezvous state in the store is that of another version of torch.")
    vars(state).update(values)
    return pickle.dumps(state)


def _encode(value: Any) -> Any:
    if isinstance(value, datetime):
        return {"time": value.isoformat()}
    if isinstance(value, _NodeDesc):
        return {"node": [value.addr, value.pid, value.local_id]}
    if isinstance(value, set):
        return {"set": [_encode(v) for v in sorted(value)]}
    if isinstance(value, dict):
        return {"dict": [[_encode(k), _encode(v)] for k, v in value.items()]}
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "time":
        return datetime.fromisoformat(content)
    if kind == "node":
        addr, pid, local_id = content
        return _NodeDesc(str(addr), int(pid), int(local_id))
    if kind == "set":
        return {_decode(v) for v in content}
    if kind == "dict":
        return {_decode(k): _decode(v) for k, v in content}
    raise ValueError(f"{kind!r} is no kind of value")
