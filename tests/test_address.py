"""Where the package is to be had stands in one place, and nobody is sent to a name that is not ours."""

import runpy
from pathlib import Path

import pytest

import hub_cards
from hf_hyperattn import address
from hub_cards import escape

ROOT = Path(__file__).parents[1]
TEXTS = [
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "*/**/*.py",
        "hub_cards/**/*.jinja",
        "hub_cards/**/*.md",
        "Makefile",
    )
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).parts[0].startswith(".venv") and path != Path(__file__)
]


def test_nothing_is_installed_by_a_name_that_nobody_has_registered():
    """The command is made in address.py alone; a card, a page or an error with another one would go out of date."""
    guilty = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "pip install" in line and address.NAME in line or 'dependencies = ["hf-hyperattn' in line
    ]
    assert TEXTS and (address.RELEASED or not guilty)


@pytest.mark.parametrize(
    "released, source, said",
    [
        (False, "", "pip install . peft # in a clone of hf_hyperattn: no package index has it yet"),
        (False, "https://host/us.git", "pip install git+https://host/us.git peft"),
        (True, "https://host/us.git", "pip install hf-hyperattn peft"),
    ],
)
def test_the_command(released, source, said, monkeypatch):
    monkeypatch.setattr(address, "RELEASED", released)
    monkeypatch.setattr(address, "SOURCE", source)
    assert address.install("peft") == said


@pytest.mark.parametrize("source", ["", "https://host/us.git"])
def test_cards_say_it_and_the_address(source, tmp_path, monkeypatch):
    text = Path(address.__file__).read_text().replace('SOURCE = ""', f'SOURCE = "{source}"')
    (tmp_path / "address.py").write_text(text)
    monkeypatch.setattr(escape, "ADDRESS", tmp_path / "address.py")
    escape.environment.cache_clear()
    try:
        card = hub_cards.render_model_card({"mechanisms": [{"mechanism": "cone"}]}).text
    finally:
        escape.environment.cache_clear()
    command = runpy.run_path(str(tmp_path / "address.py"))["install"]()
    assert f"```\n{command}\n```" in card and ("git+https" in command) == bool(source)
    assert (f"the package `hf-hyperattn` ({source});" in card) == bool(source)
