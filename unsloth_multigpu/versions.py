"""The tested versions of the libraries that we use, and the installed ones. Reads metadata and imports none of them.

Older versions are refused. Newer ones are tried, with a warning; each patch is verified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

# From the oldest to the newest row of the compatibility matrix. The upper bounds are where tests end; the metadata of
# this package has only the lower ones, so that installers do not downgrade a newer release.
SUPPORTED: Mapping[str, str] = {
    "torch": ">=2.6,<2.16",
    "transformers": ">=4.57,<5.25",
    "accelerate": ">=1.4,<1.16",
    "peft": ">=0.18,<0.22",
    "datasets": ">=3.4.1,<5.3",
    "trl": ">=0.24,<1.17",
    "unsloth": ">=2026.10.7,<2026.11",
    "unsloth_zoo": ">=2026.10.7,<2026.11",
    "wrapt": ">=1.17,<2.6",
}
# Libraries of notebooks. They do not affect the training, so nodes may have different versions.
SUPPORTED_IN_NOTEBOOKS: Mapping[str, str] = {"ipython": ">=7.34", "ipykernel": ">=6.17"}
# Libraries of federated training. Ranks do not use them.
SUPPORTED_FOR_FEDERATED: Mapping[str, str] = {"flwr": ">=1.41,<2", "cloudpickle": ">=3"}
_OUTSIDE_RANKS: Mapping[str, str] = {**SUPPORTED_IN_NOTEBOOKS, **SUPPORTED_FOR_FEDERATED}

# Without these the package still trains a plain transformers script.
OPTIONAL = frozenset({"unsloth", "unsloth_zoo", *_OUTSIDE_RANKS})


@dataclass(frozen=True)
class VersionRow:
    """One library.

    Args:
        installed: Its version; None if it is not installed.
        supported: A range such as `<6,>=4.57`.
        ok: It is new enough.
        is_newer: It is ok and newer than the tested versions.
    """

    name: str
    installed: str | None
    supported: str
    ok: bool
    is_newer: bool = False


def version_rows() -> list[VersionRow]:
    """Returns one row per library of the tables, in their order. An absent optional library is ok."""
    rows = [check_version(name + supported) for name, supported in {**SUPPORTED, **_OUTSIDE_RANKS}.items()]
    return [replace(row, ok=row.ok or (row.installed is None and row.name in OPTIONAL)) for row in rows]


def check_version(requirement: str) -> VersionRow:
    """Compares the installed version with a requirement such as `transformers>=4.57,<6`.

    Local versions (`2.13.0+cpu`) and prereleases within the range count as supported. A version above it is ok and
    `is_newer`. An absent or older version, or one that does not follow PEP 440, is not ok.

    Raises:
        packaging.requirements.InvalidRequirement: The requirement cannot be parsed.
    """
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    wanted = Requirement(requirement)
    installed = installed_version(wanted.name)
    row = VersionRow(wanted.name, installed, str(wanted.specifier), ok=False)
    try:
        version = Version(installed or "")
    except InvalidVersion:
        return row
    is_tested = wanted.specifier.contains(version, prereleases=True)
    lower = [bound for bound in wanted.specifier if not bound.operator.startswith("<")]
    is_new_enough = all(bound.contains(version, prereleases=True) for bound in lower)
    return replace(row, ok=is_new_enough, is_newer=is_new_enough and not is_tested)


def installed_version(name: str) -> str | None:
    """Returns the version of an installed distribution (`-` equals `_` in its name), None if it is absent."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    # `found.version` parses all of the metadata, which takes about a millisecond, and each patch asks for a version.
    line = re.search(r"^Version: *(\S+)", found.read_text("METADATA") or "", re.MULTILINE)
    return found.version if line is None else line[1]
