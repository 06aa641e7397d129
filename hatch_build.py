"""The facts of the package that depend on where its sources live: its addresses, and the links of its README.

No address stands in the sources. It is REPOSITORY_URL, else that of the workflow's repository, else that of the clone's
remote `origin`, else what an sdist noted. Without one the package has no addresses, and links to files are plain text.
docs_site.py asks here as well.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

GITHUB = "https://github.com/"
# Whose notebooks the badges open.
BRANCH = "main"


class CustomMetadataHook(MetadataHookInterface):
    """Gives `urls` and `readme` of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Is called by hatchling for each build, editable ones as well."""
        root = Path(self.root)
        address = repository(root)
        readme = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(readme, address)}
        if address:
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/blob/HEAD/docs/start.md",
                "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }


def repository(root: Path) -> str:
    """The address of the sources' repository, or ""."""
    env = os.environ
    if "GITHUB_REPOSITORY" in env:
        workflow = f"{env.get('GITHUB_SERVER_URL', 'https://github.com')}/{env['GITHUB_REPOSITORY']}"
    else:
        workflow = ""
    noted = root / "PKG-INFO"
    if noted.is_file():
        found = re.search(r"^Project-URL: Repository, (\S+)$", noted.read_text(encoding="utf-8"), flags=re.MULTILINE)
        origin = found[1] if found else ""
    else:
        origin = _origin(root)
    return web_address(env.get("REPOSITORY_URL", "") or workflow or origin)


def web_address(remote: str) -> str:
    """The page of a remote, without a user or password that stood in it; "" for a folder or another kind of remote."""
    over_ssh = re.fullmatch(r"(?:ssh://)?git@([\w.-]+)[:/](.+)", remote.strip())
    over_https = re.fullmatch(r"https://(?:[^/@]*@)?([\w.-]+(?::\d+)?)/(.+)", remote.strip())
    found = over_ssh or over_https
    return f"https://{found[1]}/{found[2].removesuffix('/').removesuffix('.git')}" if found else ""


def absolute_links(markdown: str, address: str) -> str:
    """Links to files of the repository as PyPI needs them; without an address, their text, and no pictures."""

    def turned(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        if not address:
            return "" if mark else text
        badges = [f"[![Open in {who}]({picture})]({to})" for who, picture, to in openers(target, address)]
        return " ".join([f"{mark}[{text}]({address}/{'raw' if mark else 'blob'}/HEAD/{target})", *badges])

    return re.sub(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)", turned, with_address(markdown, address))


def with_address(markdown: str, address: str) -> str:
    """Commands with the address to clone or to install from; without one they keep the words that stand for it."""
    return re.sub(r"(\bgit clone |\bgit\+)<[^<>]+>", rf"\g<1>{address}", markdown) if address else markdown


def openers(path: str, address: str) -> list[tuple[str, str, str]]:
    """Who opens a notebook of the repository: name, picture of the badge, address. They take notebooks from GitHub."""
    if not path.endswith(".ipynb") or not address.startswith(GITHUB):
        return []
    page = f"{address}/blob/{BRANCH}/{path}"
    colab, kaggle = "https://colab.research.google.com", "https://kaggle.com"
    return [
        ("Colab", f"{colab}/assets/colab-badge.svg", f"{colab}/github/{page.removeprefix(GITHUB)}"),
        ("Kaggle", f"{kaggle}/static/images/open-in-kaggle.svg", f"{kaggle}/kernels/welcome?src={page}"),
    ]


def _origin(root: Path) -> str:
    # A folder without a repository of its own may lie in that of another project.
    if not (root / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(root), "remote", "get-url", "origin"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
