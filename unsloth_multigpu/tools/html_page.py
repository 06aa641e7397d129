"""Pages that tools write: HTML with plots inside, which needs no other file. Needs jinja2 and matplotlib."""

from __future__ import annotations

import importlib.util
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import SetupError


def check_libraries() -> None:
    """Finds out before a measurement whether its page can be written.

    Raises:
        SetupError: A library is missing.
    """
    for library, use in (("matplotlib", "draws plots"), ("jinja2", "fills its page")):
        if importlib.util.find_spec(library) is None:
            raise SetupError(f"--report {use} with {library}, which is not installed.", hint=f"pip install {library}")


def render(template: Path, **values: Any) -> str:
    """The page as HTML.

    Args:
        template: Of jinja2. It may use `date`, the time of the page.
        values: What else it uses; texts are escaped.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return environment.from_string(template.read_text(encoding="utf-8")).render(date=date, **values)
