"""The tested ranges of the libraries below us, and what is installed. Reads metadata, imports none of them.

What is older than its range is refused. What is newer is tried: each seam is verified, and one line says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

# From the oldest to the newest row of the compatibility matrix, nothing wider. The upper bounds are where tests end;
# the metadata of this package has the lower ones alone, so that no installer takes a newer release back.
SUPPORTED: Mapping[str, str] = {
    "torch": ">=2.6,<2.16",
    "transformers": ">=4.57,<5.24",
    "accelerate": ">=1.4,<1.16",
    "peft": ">=0.18,<0.22",
    "datasets": ">=3.4.1,<5.3",
    "trl": ">=0.24,<1.17",
    "unsloth": ">=2026.10.7,<2026.11",
    "unsloth_zoo": ">=2026.10.7,<2026.11",
    "wrapt": ">=1.17,<2.6",
}
# What runs a notebook. It has no part in the training, so ranks on several nodes may differ in it.
SUPPORTED_IN_NOTEBOOKS: Mapping[str, str] = {"ipython": ">=7.34", "ipykernel": ">=6.17"}
# The engine of federated training, which ranks of one training do not use.
SUPPORTED_FOR_FEDERATED: Mapping[str, str] = {"flwr": ">=1.41,<2", "cloudpickle": ">=3"}
_OUTSIDE_RANKS: Mapping[str, str] = {**SUPPORTED_IN_NOTEBOOKS, **SUPPORTED_FOR_FEDERATED}

# Without these the package still trains a plain transformers script.
OPTIONAL = frozenset({"unsloth", "unsloth_zoo", *_OUTSIDE_RANKS})


@dataclass(frozen=True)
class VersionRow:
    """One library.

    Args:
        installed: None where its metadata is absent.
        supported: A range such as `<6,>=4.57`.
        ok: It is new enough.
        is_newer: It is newer than what was tested, and otherwise ok.
    """

    name: str
    installed: str | None
    supported: str
    ok: bool
    is_newer: bool = False


def version_rows() -> list[VersionRow]:
    """Returns one row per library of the tables, in their order. An optional library may be absent and is ok then."""
    rows = [check_version(name + supported) for name, supported in {**SUPPORTED, **_OUTSIDE_RANKS}.items()]
    return [replace(row, ok=row.ok or (row.installed is None and row.name in OPTIONAL)) for row in rows]


def check_version(requirement: str) -> VersionRow:
    """Compares what is installed with a requirement such as `transformers>=4.57,<6`.

    Local versions (`2.13.0+cpu`) and prereleases within the range count as supported. A release above it is ok and
    `is_newer`. `ok` is False where the library is absent or too old, or its version is not one that PEP 440 can order.

    Raises:
        packaging.requirements.InvalidRequirement: The requirement cannot be parsed.
    """
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    wanted = Requirement(requirement)
    installed = installed_version(wanted.name)
    row = VersionRow(wanted.name, installed, str(wanted.specifier), ok=False)
    try:
        version = None if installed is None else Version(installed)
    except InvalidVersion:
        return row
    if version is None:
        return row
    is_tested = wanted.specifier.contains(version, prereleases=True)
    lower = [bound for bound in wanted.specifier if not bound.operator.startswith("<")]
    is_new_enough = all(bound.contains(version, prereleases=True) for bound in lower)
    return replace(row, ok=is_new_enough, is_newer=is_new_enough and not is_tested)


def installed_version(name: str) -> str | None:
    """Returns the version in the metadata of a distribution (`-` and `_` are the same), None where it is absent."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
