"""What is published beside the code: addresses, the README on PyPI, versions, and what hints tell to install."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

import unsloth_multigpu
from tests.matrix.record import ROOT, read_toml

PROJECT = read_toml(ROOT / "pyproject.toml")["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(monkeypatch):
    """hatch_build.py, whose one import exists in environments of builds only."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin", interface.__name__):
        monkeypatch.setitem(sys.modules, name, interface)
    return load("hatch_build")


@pytest.fixture
def site(build, monkeypatch):
    """docs_site.py, whose other imports exist in the environment of `make docs` only."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "hatch_build", build)
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files", "mkdocs.structure.pages"):
        module = ModuleType(name)
        module.File = module.Files = module.Page = object
        monkeypatch.setitem(sys.modules, name, module)
    return load("docs_site")


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/a/b.git\n", "https://github.com/a/b"),
        ("https://me:secret@git.host.org:8443/a/b/", "https://git.host.org:8443/a/b"),
        ("git@github.com:a/b.git", "https://github.com/a/b"),
        ("ssh://git@github.com/a/b", "https://github.com/a/b"),
        ("/srv/git/b.git", ""),
        ("file:///srv/b", ""),
        ("", ""),
    ],
)
def test_address_of_a_remote_is_a_page_without_secrets(build, remote, address):
    assert build.web_address(remote) == address


def test_address_comes_from_the_variable_the_workflow_the_clone_or_the_sdist(build, tmp_path, monkeypatch):
    for name in ("REPOSITORY_URL", "GITHUB_REPOSITORY", "GITHUB_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    assert build.repository(tmp_path) == ""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert build.repository(tmp_path) == ""
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", "git@host.org:a/b.git"], check=True)
    assert build.repository(tmp_path) == "https://host.org/a/b"
    (tmp_path / "PKG-INFO").write_text("Name: x\nProject-URL: Repository, https://host.org/c/d\n")
    assert build.repository(tmp_path) == "https://host.org/c/d"
    monkeypatch.setenv("GITHUB_REPOSITORY", "e/f")
    assert build.repository(tmp_path) == "https://github.com/e/f"
    monkeypatch.setenv("REPOSITORY_URL", "https://host.org/g/h")
    assert build.repository(tmp_path) == "https://host.org/g/h"


def test_readme_of_the_package_has_no_relative_link(build):
    shown = build.absolute_links(README, "https://host.org/a/b")
    targets = re.findall(r"\]\(([^()\s]+)\)", shown)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "![A training on two ranks in JupyterLab](https://host.org/a/b/raw/HEAD/docs/pictures/" in shown
    assert "(https://host.org/a/b/blob/HEAD/docs/options.md)" in shown
    assert "\ngit clone https://host.org/a/b unsloth-multigpu\n" in shown
    assert "Open in" not in shown  # Colab and Kaggle take notebooks from GitHub.


def test_site_shows_each_recipe_as_it_is(site):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="cluster.md"))
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    shown = site.on_page_markdown(text, page, SimpleNamespace(repo_url=""), None)
    for recipe in (ROOT / "examples" / "cluster").iterdir():
        assert f"examples/cluster/{recipe.name}\n\n```" in shown
        assert f"\n{recipe.read_text(encoding='utf-8').rstrip()}\n```" in shown


def test_site_links_to_the_address_of_the_package_and_has_badges_in_words(site, monkeypatch):
    text = '[n](../examples/notebook.ipynb) [t](../examples/tiny_model.py)\n```\npip install "git+<its address>"\n```\n'

    def shown(address):
        monkeypatch.setenv("REPOSITORY_URL", address)
        config = site.on_config(SimpleNamespace(repo_url=None, repo_name=None))
        page = SimpleNamespace(file=SimpleNamespace(src_uri="kaggle.md"))
        return site.on_page_markdown(text, page, config, None)

    blob, page = "https://github.com/a/b/blob/HEAD/examples/", "github.com/a/b/blob/main/examples/notebook.ipynb"
    assert shown("git@github.com:a/b.git") == (
        f"[n]({blob}notebook.ipynb) "
        f"[Open in Colab](https://colab.research.google.com/{page.replace('github.com', 'github')}){{ .badge }} "
        f"[Open in Kaggle](https://kaggle.com/kernels/welcome?src=https://{page}){{ .badge }} "
        f'[t]({blob}tiny_model.py)\n```\npip install "git+https://github.com/a/b"\n```\n'
    )
    assert "Open in" not in shown("https://host.org/a/b")
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    monkeypatch.setattr(site.hatch_build, "_origin", lambda _: "")
    assert shown("") == 'n t\n```\npip install "git+<its address>"\n```\n'


def test_site_has_every_public_name(site):
    shown = re.findall(r"^::: unsloth_multigpu\.(?:\w+\.)+(\w+)$", site._api(), flags=re.MULTILINE)
    assert {name for name in unsloth_multigpu.__all__ if callable(getattr(unsloth_multigpu, name))} <= set(shown)


def test_version_is_the_same_in_every_place_and_the_oldest_python_and_types_are_named():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {unsloth_multigpu.__version__}\n" in citation
    assert unsloth_multigpu.__version__ in README
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["requires-python"] == ">=3.10"
    assert {"Programming Language :: Python :: 3.10", "Typing :: Typed"} <= set(PROJECT["classifiers"])
    assert (ROOT / "unsloth_multigpu" / "py.typed").is_file()


def test_no_hint_installs_a_package_that_is_not_what_it_names():
    # Until it is published, anybody may take the package's own name: hints install the library itself.
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    known = {re.split(r"[^\w-]", text)[0] for group in groups for text in group}
    found = {name for path in (ROOT / "unsloth_multigpu").rglob("*.py") for name in installed_by(path.read_text())}
    assert found
    assert found <= known


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_install_the_package_by_its_name_once_it_is_published(path):
    # The heading of a version in the changelog is what .github/workflows/release.yml asks for.
    is_published = re.search(r"^## \[\d", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    text = "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    package = "unsloth_multigpu" if is_published else ".."
    assert re.findall(r"%pip install (.*)", text) == [f"-q unsloth {package}"]
    assert ("not on PyPI yet" in text) == (not is_published)


def test_check_of_hints_catches_a_planted_one():
    source = "hint = 'pip install \"unsloth-multigpu[report]\" matplotlib, say'\nx = f'pip install \"{name}>=1\"'"
    assert list(installed_by(source)) == ["unsloth-multigpu", "matplotlib"]


def installed_by(source):
    """What the texts of a module tell to install by name."""
    for node in ast.walk(ast.parse(source if re.search(r"pip\W+install", source) else "")):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for command in re.findall(r"pip install ([^,.;]*)", node.value.replace("[", " [")):
                for word in command.split():
                    if name := re.match(r"""^["']?([A-Za-z][\w-]*)(?=$|["'<>=])""", word):
                        yield name[1]


def test_makefile_reads_no_variable_that_nobody_sets():
    # An empty one turns `rm -rf $(SITE)/bin` into another command.
    targets = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:")).split()
    command = ["make", "--warn-undefined-variables", "--dry-run", *targets[1:]]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "undefined variable" not in shown.stderr
    assert "--out build/gpu/result.json" in shown.stdout
