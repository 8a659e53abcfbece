"""README and docs/: no dead link, unbuilt or built, every setting is told, map and messages are those of the code."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import hkd_hpc
from hkd_hpc import schemes
from hkd_hpc.commands import hkd as cli
from hkd_hpc.config import keys_of
from hkd_hpc.config.presets import PRESETS
from hkd_hpc.doctor import examine

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG", "slurm/README")), *DOCS]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.fixture(scope="module")
def hooks():
    """docs/hooks.py, as mkdocs loads it."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_citation_is_of_this_version():
    assert f"\nversion: {hkd_hpc.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_to_a_file_and_a_heading(page):
    """As a forge shows the pages, where included text is a link and tables of settings are missing."""
    assert dead_links(page, Path.read_text) == []


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_relative_links_of_built_pages_lead_to_a_page_and_a_heading(page, hooks):
    built = lambda file: hooks.on_page_markdown(file.read_text())
    assert dead_links(page, built) == []
    targets = [target for target, _ in LINK.findall(built(page)) if target]
    assert [target for target in targets if not (ROOT / "docs" / target).is_file() or "/" in target] == []


def dead_links(page, text_of):
    """The links of a page to a file or a heading that is not there; text_of(file): what a reader of the file sees."""
    found = [
        ((page.parent / target).resolve() if target else page, target, anchor)
        for target, anchor in LINK.findall(text_of(page))
    ]
    return [
        f"{target}#{anchor}"
        for file, target, anchor in found
        if not file.exists() or (anchor and anchor not in anchors(text_of(file)))
    ]


def anchors(text: str) -> set[str]:
    """The names of the headings of a page, as GitHub and mkdocs make them of ours."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_all_that_the_map_of_the_tree_names_exists(page):
    tree = (ROOT / page).read_text().split("## The tree")[1].split("\n## ")[0]
    names = re.findall(r"^    (\S+)  +\S", tree, re.MULTILINE)
    assert len(names) > 15
    assert [name for name in names if not (ROOT / name).exists()] == []
    packages = {path.parent.name for path in (ROOT / "hkd_hpc").glob("*/__init__.py")}
    assert [name for name in sorted(packages) if not re.search(rf"\b{name}/", tree)] == []


def test_the_settings_page_names_every_setting_scheme_and_preset(hooks):
    page = hooks.on_page_markdown((ROOT / "docs/settings.md").read_text())
    for name in (*schemes.REGISTRY, *schemes.CONTROLS):
        assert f"### scheme.name={name}\n" in page
        for key in keys_of(schemes.settings_of(name)):
            assert f"| `{key}` |" in page
    assert [name for name in PRESETS if f"| `{name}` |" not in page] == []


def test_getting_started_names_every_command():
    page = (ROOT / "docs/getting_started.md").read_text()
    assert [name for name in cli.COMMANDS if f"| `hkd {name}` | `python -m " not in page] == []


def test_included_text_is_there_and_leads_nowhere_outside(hooks):
    text = hooks.on_page_markdown((ROOT / "docs/extending.md").read_text())
    assert "\n## Add your own scheme\n" in text
    assert "\nclass MyScheme(Scheme):\n" in text
    assert "## Change something else" not in text
    assert [target for target, _ in LINK.findall(text) if "/" in target] == []


def test_the_doctors_page_names_every_finding(hooks):
    page = hooks.on_page_markdown((ROOT / "docs/doctor.md").read_text())
    assert [kind.name for kind in examine.kinds() if f"| `{kind.name}` | {kind.level} |" not in page] == []


def test_messages_of_the_troubleshooting_page_are_those_of_the_code():
    """Of the first column all but what others print, which says so in brackets."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    ours = [
        row
        for row in re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
        if not re.search(r"\((?:.+'s|your own file)\)", row)
    ]
    assert len(ours) >= 25
    texts = literals()
    for row in ours:
        for part in row.split("`")[1].split("..."):
            assert any(part.strip() in text for text in texts), f"no message has: {part.strip()}"


def literals() -> list[str]:
    """Every text in the package's code, parts of f-strings between their placeholders included."""
    files = [path for path in (ROOT / "hkd_hpc").rglob("*.py") if "slurm" not in path.parts]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_paths_in_commands_that_messages_advise_are_quoted():
    """Whoever pastes one may have a blank in it."""
    command = re.compile(r"python -m [\w.]+( \w+)? \{|--resume --out \{")
    lines = [line for path in (ROOT / "hkd_hpc").rglob("*.py") for line in path.read_text().splitlines()]
    found = [line for line in lines if command.search(line)]
    assert len(found) >= 5
    assert [line for line in found if "{shlex.quote(str(" not in line] == []
