"""Plots that follow the reader's theme: no background, and reversed lightness on dark pages."""

from __future__ import annotations

import re
from pathlib import Path

#: GitHub and the site show a plot as an image. An image follows the colour scheme of its page.
RULE = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(1) hue-rotate(180deg); } }</style>"
#: The backgrounds of a figure, its axes and its legends, as matplotlib writes them.
BACKGROUND = re.compile(r'(<g id="patch_\d+">\s*<path d="[^"]*" style="fill: )#ffffff')


def follow_theme(path: Path) -> None:
    """Rewrite an SVG of matplotlib. A second time changes nothing."""
    text = BACKGROUND.sub(r"\1none", path.read_text(encoding="utf-8"))
    if RULE not in text:
        text = text.replace("<defs>", f"{RULE}\n <defs>", 1)
    path.write_text(text, encoding="utf-8")
