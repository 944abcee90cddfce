"""The site of the documentation: its reference has every public name, and it builds without a warning."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_hyperattn as ha
from hf_hyperattn import analysis, functional, geometry, inject, testing
from hf_hyperattn.integration.patching.versions import TESTED

ROOT = Path(__file__).parents[2]
REFERENCE = "\n".join(
    page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")
)
NAMES = set(re.findall(r"^\.\. auto(?:class|exception|function):: (\S+)$", REFERENCE, re.MULTILINE))


@pytest.mark.parametrize(
    "module", [ha, functional, analysis, geometry, inject, testing], ids=lambda m: m.__name__
)
def test_every_public_name_is_in_the_reference(module):
    things = {name: getattr(module, name) for name in module.__all__}
    public = {f"{module.__name__}.{name}" for name, thing in things.items() if callable(thing)}
    assert not public - NAMES


def list_contents(page: Path) -> set[Path]:
    """Return the pages that the tables of contents of `page` name."""
    tables = re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names = [line for table in tables for line in re.findall(r"^[\w./]+$", table, re.MULTILINE)]
    return {(page.parent / f"{name}.md").resolve() for name in names if name != "self"}


def test_every_page_is_in_the_contents_once():
    pages = {*(ROOT / "docs").glob("**/*.md")}
    listed = [name for page in pages for name in list_contents(page)]
    assert sorted(listed) == sorted(pages - {ROOT / "docs" / "index.md"})


def load_conf():
    """docs/conf.py as a module."""
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location("docs_conf", ROOT / "docs" / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


CUT = """\
A sentence that loses
% of its words.

- An item
  of 3
  + 4 parts.

These lines end with
10. They do.

| a | b |
- a list after a table
A heading of a list:
- no fault

```
code
% no fault
```
"""


def test_lines_that_markdown_cuts_are_found():
    lines = CUT.splitlines()
    cut = [lines.index(line) + 1 for line in ("% of its words.", "  + 4 parts.", "10. They do.")]
    assert [number for number, _ in load_conf().find_cut_sentences(CUT)] == cut


def test_the_site_has_a_light_and_a_dark_image_for_every_picture():
    conf = load_conf()
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("**/*.md")]
    count = sum(page.count("<picture>") for page in pages)
    replaced = "".join(conf.replace_pictures(page) for page in pages)
    assert count >= 5 and "<picture>" not in replaced
    assert replaced.count(":class: only-light") == replaced.count(":class: only-dark") == count


def test_no_page_has_a_line_that_markdown_cuts():
    find = load_conf().find_cut_sentences
    pages = [*ROOT.glob("*.md")]
    for folder in ("docs", "hub_cards", "recipes"):
        pages += ROOT.glob(f"{folder}/**/*.md")
    cut = {page.name: find(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: lines for name, lines in cut.items() if lines} == {}


@pytest.mark.docs
@pytest.mark.timeout(900)
def test_the_site_builds(tmp_path):
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "docs",
        str(tmp_path),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "api" / "functional.html").read_text(encoding="utf-8")
    assert "hf_hyperattn.functional.cone_attention" in page


@pytest.mark.parametrize("mechanism", [m["name"] for m in ha.list_mechanisms()])
def test_pages_of_mechanisms_have_the_same_headings(mechanism):
    page = (ROOT / "docs" / f"{mechanism}.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Use", "Parameters", "Definition", "Limits", "Evidence"]


def test_tested_versions_are_those_of_the_package():
    page = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w+) \|.*\| ([\d.]+ to [\d.]+) \|$", page, re.MULTILINE))
    found = {name.lower(): versions for name, versions in rows.items()}
    assert {name: " to ".join(bounds) for name, bounds in TESTED.items()}.items() <= found.items()
