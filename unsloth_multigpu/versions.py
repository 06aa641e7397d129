"""The supported ranges of the libraries below us, and what is installed. Reads metadata, imports none of them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

# The wide ranges. Exact versions that were tested are pinned where the set-up is, not here.
SUPPORTED: Mapping[str, str] = {
    "torch": ">=2.6,<2.15",
    "transformers": ">=4.57,<6",
    "accelerate": ">=1.3",
    "peft": ">=0.18",
    "datasets": ">=3.4.1,<5",
    "trl": ">=0.24,<2",
    "unsloth": ">=2026.10.1",
    "unsloth_zoo": ">=2026.10.1",
    "wrapt": ">=1.17",
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
    """One library: `installed` is None where its metadata is absent, `supported` a range such as `<6,>=4.57`."""

    name: str
    installed: str | None
    supported: str
    ok: bool


def version_rows() -> list[VersionRow]:
    """Returns one row per library of the tables, in their order. An optional library may be absent and is ok then."""
    rows = [check_version(name + supported) for name, supported in {**SUPPORTED, **_OUTSIDE_RANKS}.items()]
    return [replace(row, ok=row.ok or (row.installed is None and row.name in OPTIONAL)) for row in rows]


def check_version(requirement: str) -> VersionRow:
    """Compares what is installed with a requirement such as `transformers>=4.57,<6`.

    Local versions (`2.13.0+cpu`) and prereleases within the range count as supported. `ok` is False where the
    library is absent or its version is not one that PEP 440 can order.

    Raises:
        packaging.requirements.InvalidRequirement: The requirement cannot be parsed.
    """
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    wanted = Requirement(requirement)
    installed = installed_version(wanted.name)
    try:
        ok = installed is not None and wanted.specifier.contains(Version(installed), prereleases=True)
    except InvalidVersion:
        ok = False
    return VersionRow(wanted.name, installed, str(wanted.specifier), ok)


def installed_version(name: str) -> str | None:
    """Returns the version in the metadata of a distribution (`-` and `_` are the same), None where it is absent.

    "python" is the interpreter, for patches of its standard library.
    """
    from importlib.metadata import PackageNotFoundError, version

    if name == "python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return None
