"""The reference of the command line: `python -m tests.docs.options` writes docs/options.md from the parser."""

from __future__ import annotations

import os
from pathlib import Path

from hyperattn_cli import build_parser

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
HEAD = """# Options of every command

This page is what every command prints with `--help`. [The command](command.md) says what each command is for.
`python -m tests.docs.options` writes it.
"""


def render_page() -> str:
    """Return the Markdown of the page: one section for each command, in alphabetical order."""
    os.environ["COLUMNS"] = "88"  # argparse reads the width of the text from there
    commands = build_parser()._subparsers._group_actions[0].choices
    sections = [
        f"\n## {name}\n\n```text\n{commands[name].format_help().rstrip()}\n```\n"
        for name in sorted(commands)
    ]
    return HEAD + "".join(sections)


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
