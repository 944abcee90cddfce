"""docs/options.md is what the parser of the command prints."""

import re
import sys

import pytest

from hyperattn_cli import build_parser
from tests.docs.options import PAGE, render_page


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="other versions of argparse print other lines"
)
def test_page_is_current(monkeypatch):
    monkeypatch.setenv("COLUMNS", "88")
    page = PAGE.read_text(encoding="utf-8")
    assert page == render_page(), "run `python -m tests.docs.options`"


def test_every_option_is_on_the_page():
    sections = dict(
        re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    )
    commands = build_parser()._subparsers._group_actions[0].choices
    assert sections.keys() == commands.keys()
    for name, parser in commands.items():
        assert not [o for o in parser._option_string_actions if o not in sections[name]], name
