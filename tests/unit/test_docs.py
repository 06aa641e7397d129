"""The Markdown pages: links lead somewhere, both READMEs say the same, and what is generated is of this code."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path

import pytest

from tests.helpers.house_page import arrows, circles, written
from tests.helpers.pages import options_markdown, seams_markdown
from tests.helpers.run import ROOT
from tests.unit.test_house_rules import LAYERS
from unsloth_multigpu.train.loop import PLACES

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")])
MAX_README_WORDS = 900
READMES = ("README.md", "README.zh-CN.md")
# What the site shows beside its two columns in a window of 1280 pixels.
MAX_CODE_WIDTH = 96
_CODE = re.compile(r"^```.*?^```$", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()]*\))?)\)")


def text_of(page: Path) -> str:
    """Without what is shown as code, in which nothing is a link."""
    return re.sub(r"`[^`\n]*`", "`code`", _CODE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings, and the site as well."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        assert slug not in found, f"{page.name} has two headings {heading!r}: links reach only the first"
        found.add(slug)
    return found


def broken(page: Path, text: str) -> Iterator[str]:
    """Links of a page to files or headings that do not exist."""
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: {link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path) -> None:
    assert list(broken(page, text_of(page))) == []


def test_check_of_links_catches_planted_ones() -> None:
    page = ROOT / "README.md"
    text = "[a](docs/none.md) [b](docs/errors.md#none) ![c](none.png) [d](docs/errors.md#configerror) [e](https://x.y)"
    assert [line.split(": ")[1] for line in broken(page, text)] == ["docs/none.md", "docs/errors.md#none", "none.png"]


def test_code_fits_into_the_column_of_the_site() -> None:
    blocks = re.compile(r"^```\w+\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    lines = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        if page.name != "CLAUDE.md"
        for block in blocks.findall(page.read_text(encoding="utf-8"))
        for line in block.splitlines()
        if sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line) > MAX_CODE_WIDTH
    ]
    assert lines == []


def test_readmes_have_the_same_content() -> None:
    def outline(name: str) -> dict[str, list[str]]:
        text = (ROOT / name).read_text(encoding="utf-8")
        links = [link for link in _LINK.findall(text) if not link.startswith("README")]
        return {
            "headings": re.findall(r"^#+ ", text, flags=re.MULTILINE),
            "rows": [str(line.count("|")) for line in text.splitlines() if line.startswith("|")],
            "links": sorted(links),
            # Comments and the clone's address are translated.
            "code": [re.sub(r"(#.*|<.*?>)", "", block) for block in _CODE.findall(text)],
            "names": sorted(set(re.findall(r"`([\w.%/-]+)`", text))),
        }

    english, chinese = map(outline, READMES)
    assert english == chinese


@pytest.mark.parametrize("name", READMES)
def test_readme_is_short_and_tells_what_the_gate_runs(name: str) -> None:
    commands = (ROOT / name).read_text(encoding="utf-8")
    assert len(re.findall(r"\S*\w\S*", commands)) <= MAX_README_WORDS
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^make test\b", gate, flags=re.MULTILINE)
    for target in ("demo", "test"):
        assert re.search(rf"^make {target}\b", commands, flags=re.MULTILINE)
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, new = set(), [ROOT / "README.md"]
    while new:
        page = new.pop()
        reached.add(page)
        linked = [(page.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(text_of(page))]
        new += [path for path in linked if path.suffix == ".md" and path.exists() and path not in reached]
    missed = [str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md") if page.resolve() not in reached]
    assert missed == [], "link them from the README, or from a page that it leads to"


@pytest.mark.parametrize(
    ("name", "made", "module"),
    [
        ("options", lambda _: options_markdown(), "pages"),
        ("seams", lambda _: seams_markdown(), "pages"),
        ("architecture", written, "house_page"),
    ],
)
def test_page_is_that_of_this_code(name: str, made: Callable[[str], str], module: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page == made(page), f"write it again: python -m tests.helpers.{module}"
    assert name == "options" or "|  |\n" not in page  # Each patch has a reason.


def test_examples_import_what_there_is() -> None:
    for path in (ROOT / "examples").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unsloth_multigpu."):
                module = import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], path


def test_each_place_of_parts_has_one() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "unsloth_multigpu").rglob("*.py"))
    assert set(re.findall(r'^    place = "(\w+)"$', text, flags=re.MULTILINE)) == {name for name, _ in PLACES}


def test_no_folder_reaches_itself_and_no_arrow_goes_up() -> None:
    found = arrows()
    assert len(found) > 50
    assert circles(found) == []
    assert [(a, b) for a, b in found if LAYERS[a] < LAYERS[b]] == []
    assert {"wire", "session"} <= set(circles(found | {("wire", "session")}))


def test_links_of_the_package_lead_to_headings() -> None:
    named = [
        (path, found)
        for path in (ROOT / "unsloth_multigpu").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for found in re.findall(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", node.value)
    ]
    assert named
    for path, (page, anchor) in named:
        assert (ROOT / page).exists(), f"{path.name}: {page}"
        assert not anchor or anchor in anchors(ROOT / page), f"{path.name}: {page}#{anchor}"


@pytest.mark.parametrize("name", ["torch", "transformers", "trl", "accelerate", "unsloth"])
def test_comparison_is_of_the_versions_that_are_installed(name: str) -> None:
    version = metadata.version(name).partition("+")[0]
    text = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    assert re.search(rf"\b{name}\b[^\n]*\b{re.escape(version)}\b", text, re.IGNORECASE)
