"""German and English help texts of LibreOffice, aligned by the ids of their paragraphs, from two Debian packages."""

from __future__ import annotations

import functools
import random
from html.parser import HTMLParser
from pathlib import Path

from .debian import unpacked

PACKAGES = ("libreoffice-help-en-us", "libreoffice-help-de")
#: A sentence in German and in English.
Pair = tuple[str, str]


class Paragraphs(HTMLParser):
    """The text of every paragraph and heading that has an id, by that id."""

    def __init__(self):
        super().__init__()
        self.texts: dict[str, str] = {}
        self.inside: tuple[str, str] | None = None

    def handle_starttag(self, tag, attrs):
        found = dict(attrs).get("id") or ""
        if found.startswith(("par_id", "hd_id")):
            self.inside = (tag, found)
            self.texts[found] = ""

    def handle_endtag(self, tag):
        if self.inside and tag == self.inside[0]:
            self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.texts[self.inside[1]] += data


def paragraphs(page: Path) -> dict[str, str]:
    """The paragraphs of a page, white space made even."""
    parser = Paragraphs()
    parser.feed(page.read_text(encoding="utf-8"))
    return {key: " ".join(text.split()) for key, text in parser.texts.items()}


@functools.cache
def pairs(least: int, most: int) -> tuple[Pair, ...]:
    """All different pairs of so many words on either side, but for those that were left untranslated.

    Raises:
        ValueError: the packages are neither installed nor can be fetched.
    """
    inside = Path("usr/share/libreoffice/help")
    root = Path("/") / inside
    if not all((root / language / "text").exists() for language in ("de", "en-US")):
        root = unpacked(PACKAGES) / inside
    found = {}
    for page in sorted((root / "de").rglob("*.html")):
        other = root / "en-US" / page.relative_to(root / "de")
        if other.exists():
            german, english = paragraphs(page), paragraphs(other)
            for key in german.keys() & english.keys():
                found[german[key], english[key]] = None
    fits = lambda text: least <= len(text.split()) <= most
    return tuple(sorted(pair for pair in found if pair[0] != pair[1] and all(map(fits, pair))))


def pairs_in(folder: Path, name: str) -> list[Pair]:
    """The lines of two text files, name.de and name.en, as pairs.

    Raises:
        ValueError: the files have different numbers of lines.
    """
    german, english = (
        (folder / f"{name}.{end}").read_text(encoding="utf-8").splitlines() for end in ("de", "en")
    )
    if len(german) != len(english):
        raise ValueError(
            f"{folder / name}.de has {len(german)} lines, .en {len(english)}; allowed: as many, aligned"
        )
    return list(zip(german, english))


def parts(found: tuple[Pair, ...], sizes: dict[str, int], seed: int) -> dict[str, list[Pair]]:
    """So many pairs for each name, and "train" for the rest; no side of a pair is in two parts.

    Args:
        found: all pairs.
        sizes: by name, as "search" and "test".
        seed: of the order.
    """
    rows = list(found)
    random.Random(f"help texts {seed}").shuffle(rows)
    made: dict[str, list[Pair]] = {}
    sides: set[str] = set()
    for name, size in sizes.items():
        made[name] = []
        while len(made[name]) < size:
            row = rows.pop()
            if not sides.intersection(row):
                made[name].append(row)
        sides.update(side for row in made[name] for side in row)
    made["train"] = [row for row in rows if not sides.intersection(row)]
    return made
