"""What MkDocs does beside its configuration: pages from the root of the repository, and links out of docs/.

The same Markdown is read on GitHub and on the site. README.md, SECURITY.md, CONTRIBUTING.md and CHANGELOG.md become
pages here; links to sources lead to the repository where its address is known (hatch_build.py), and are plain text
where it is not.
Behind a link to a notebook stands who opens it. Behind commands.md stands what `--help` says, behind api.md the
docstring of every public name, and below each link to a recipe of cluster.md the file.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

import hatch_build  # noqa: E402

# Page of the site -> its source.
FROM_ROOT = {
    "index.md": "README.md",
    "zh.md": "README.zh-CN.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
_SITE_PAGE_OF = {source: page for page, source in FROM_ROOT.items()}
_LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
# A link to a recipe, alone in its line.
_RECIPE = re.compile(r"^\[examples/cluster/([\w.]+)\]\(\.\./examples/cluster/\1\)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Fills in the address of the repository, where it is known."""
    config.repo_url = hatch_build.repository(ROOT)
    config.repo_name = urlsplit(config.repo_url).hostname
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside of docs/."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turns the links of a page, and fills in what is made from the code."""
    name = page.file.src_uri
    address = config.repo_url
    source = PurePosixPath(FROM_ROOT.get(name, f"docs/{name}"))
    if name == "commands.md":
        markdown += _commands()
    if name == "api.md":
        markdown += _api()
    if name == "cluster.md":
        markdown = _RECIPE.sub(_shown, markdown)

    def turned(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        path, _, anchor = target.partition("#")
        place = PurePosixPath(os.path.normpath(source.parent / path))
        to = _SITE_PAGE_OF.get(str(place)) or (str(place)[5:] if place.parts[0] == "docs" else None)
        if to is not None and (ROOT / place).is_file():
            relative = os.path.relpath(to, PurePosixPath(name).parent)
            return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"
        kind = "tree" if (ROOT / place).is_dir() else "blob"
        if not address:
            return text
        # In words: the site loads nothing from other servers, pictures of badges included.
        badges = [f"[Open in {who}]({to}){{ .badge }}" for who, _, to in hatch_build.openers(str(place), address)]
        return " ".join([f"[{text}]({address}/{kind}/HEAD/{place})", *badges])

    markdown = hatch_build.with_address(markdown, address)
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(turned, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(turned, markdown[end:])])


def _commands() -> str:
    """The frozen `--help` of each command, from the test that holds it."""
    texts = (ROOT / "tests" / "unit" / "help.txt").read_text(encoding="utf-8").split("$ unsloth-multigpu")[1:]
    shown = []
    for text in texts:
        arguments, _, help_text = text.partition("\n")
        shown.append(f"\n## unsloth-multigpu{arguments}\n\n```text\n{help_text.strip()}\n```\n")
    return "".join(shown)


def _shown(recipe: re.Match[str]) -> str:
    """The link, and below it the file."""
    path = ROOT / "examples" / "cluster" / recipe[1]
    language = "yaml" if path.suffix == ".yaml" else "bash"
    return f"{recipe[0]}\n\n```{language}\n{path.read_text(encoding='utf-8').rstrip()}\n```"


def _api() -> str:
    import unsloth_multigpu as package

    names = sorted(package.__all__, key=str.lower)
    errors = [name for name in names if name.endswith("Error")]
    functions = [name for name in names if name not in errors and name.islower()]
    classes = [name for name in names if name not in errors and name not in functions]
    text = ""
    for title, members in (("Functions", functions), ("Classes", classes), ("Errors", errors)):
        text += f"\n## {title}\n"
        for name in members:
            home = package._MODULE_OF.get(name)
            text += f"\n::: unsloth_multigpu.{home}.{name}\n" if home else ""
    return text
