"""Records of Flower and the state of a strategy as JSON and tensors, and back. Nothing is pickled: files are data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from unsloth_multigpu.errors import ConfigError, ResumeError
from unsloth_multigpu.federated.strategy import layers_of

if TYPE_CHECKING:
    import numpy as np

    Tensors = dict[str, np.ndarray[Any, Any]]

_RECORDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (ArrayRecord, ConfigRecord, MetricRecord, RecordDict, dict)
}
_KIND = "kind"


def pack(value: Any, tensors: Tensors, path: str) -> Any:
    """What JSON can hold of `value`; its arrays go into `tensors`, under names that begin with `path`.

    Raises:
        TypeError: A value of a kind that is not stored, with its path.
    """
    import numpy as np

    # Checked before float: numpy.float64 is a float, but its sums with float32 have another dtype than a float's.
    if isinstance(value, np.ndarray | np.generic):
        tensors[path] = np.array(value, order="C")
        return {_KIND: "ndarray" if isinstance(value, np.ndarray) else "scalar", "key": path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Array):
        # safetensors writes memory in its order: a transposed array would be read back with other values.
        tensors[path] = np.asarray(value.numpy(), order="C")
        return {_KIND: "Array", "key": path}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "hex": value.hex()}
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{path}/{number}") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if type(value).__name__ in _RECORDS and isinstance(value, Mapping):
        items = [[pack(key, tensors, path), pack(item, tensors, f"{path}/{key}")] for key, item in value.items()]
        return {_KIND: type(value).__name__, "items": items}
    if _has_state_dict(value):
        return {_KIND: "state_dict", "state": pack(value.state_dict(), tensors, path)}
    raise TypeError(f"{path} is of {type(value).__module__}.{type(value).__qualname__}")


def unpack(packed: Any, tensors: Tensors) -> Any:
    """What `pack` was given. Arrays are copies of their own."""
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed[_KIND]
    if kind in ("ndarray", "Array", "scalar"):
        array = tensors[packed["key"]].copy()
        return Array(array) if kind == "Array" else array if kind == "ndarray" else array[()]
    if kind == "bytes":
        return bytes.fromhex(packed["hex"])
    if kind == "tuple":
        return tuple(unpack(packed["items"], tensors))
    if kind == "state_dict":
        return unpack(packed["state"], tensors)
    # In the original order: some strategies match arrays by position.
    return _RECORDS[kind]({unpack(key, tensors): unpack(item, tensors) for key, item in packed["items"]})


def pack_strategy(strategy: Strategy, tensors: Tensors) -> tuple[list[dict[str, Any]], list[str]]:
    """Attributes of a strategy and of what it wraps, and the names of those that are of no kind that can be stored."""
    layers, left_out = [], []
    for depth, layer in enumerate(layers_of(strategy)):
        stored: dict[str, Any] = {}
        for name, value in vars(layer).items():
            if isinstance(value, Strategy) or (callable(value) and not _has_state_dict(value)):
                continue
            try:
                stored[name] = pack(value, tensors, f"{depth}/{name}")
            except TypeError:
                left_out.append(f"{type(layer).__name__}.{name}")
        layers.append({"class": type(layer).__name__, "attributes": stored})
    return layers, left_out


def restore_strategy(strategy: Strategy, layers: list[dict[str, Any]], tensors: Tensors) -> None:
    """Gives a strategy the attributes that `pack_strategy` stored.

    Raises:
        ResumeError: The stored state is that of another strategy, or of one without a part that this one has.
    """
    own = list(layers_of(strategy))
    names = [type(layer).__name__ for layer in own]
    stored_names = [layer["class"] for layer in layers]
    if names != stored_names:
        raise ResumeError(
            f"the round was made with strategy {' of '.join(stored_names)}, this is {' of '.join(names)}.",
            hint="Use the same strategy.",
        )
    for layer, stored in zip(own, layers, strict=True):
        _check_parts(layer, stored["attributes"])
        for name, packed in stored["attributes"].items():
            value = unpack(packed, tensors)
            if _is_part(packed):
                getattr(layer, name).load_state_dict(value)
            else:
                setattr(layer, name, value)


def _check_parts(layer: Strategy, stored: Mapping[str, Any]) -> None:
    """Neither way: an accountant of privacy would be put out of use, or would begin in the middle."""
    before = {name for name, packed in stored.items() if _is_part(packed)}
    now = {name for name, value in vars(layer).items() if _has_state_dict(value)}
    now |= {
        name for name, packed in stored.items() if packed is None and not _can_be_stored(getattr(layer, name, None))
    }
    for name in sorted(before ^ now):
        raise ResumeError(
            f"the round was made {'with' if name in before else 'without'} {type(layer).__name__}.{name}, unlike this "
            "training.",
            hint="Give the strategy the same parts.",
        )


def _is_part(packed: Any) -> bool:
    return isinstance(packed, dict) and packed[_KIND] == "state_dict"


def _can_be_stored(value: Any) -> bool:
    if callable(value):
        return False
    try:
        pack(value, {}, "")
    except TypeError:
        return False
    return True


def to_config_record(config: Mapping[str, Any]) -> ConfigRecord:
    """A ConfigRecord; raises ConfigError where Flower refuses a value."""
    try:
        return ConfigRecord(dict(config))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config cannot be sent to the clients: {error}", hint="Change config.") from error


def to_metric_record(metrics: Mapping[str, Any], source: str) -> MetricRecord:
    """A MetricRecord; raises ConfigError where a value is neither a number nor a list of numbers.

    Args:
        metrics: What a user's function returned; numbers of numpy and tensors with one element count as numbers.
        source: Name of that function, for the error.
    """
    try:
        return MetricRecord({name: _plain(value) for name, value in metrics.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{source} returned {metrics!r}, which are no metrics: {error}",
            hint="Return a dict of names and numbers, or lists of numbers.",
        ) from error


def _plain(value: Any) -> Any:
    """A tensor or a number of numpy as a number of Python."""
    return value.item() if hasattr(value, "item") else value


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
