"""JSON that every reader takes, as the tools write it."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any) -> str:
    """`value` as JSON; numbers that JSON does not have (nan, inf) as text."""
    return json.dumps(_plain(value), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
