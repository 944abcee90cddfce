"""Strings nobody vouches for: everything that a template prints is escaped unless it is marked Safe.

A card is rendered from a ``config.json`` that may come from anywhere, and shows up as a web page. Names and
settings are therefore data: they must not open a link, an HTML tag, a table cell or a second YAML header.
Markdown rules: CommonMark 0.31 (code spans, backslash escapes) and its GitHub extensions (tables, autolinks).
"""

import json
import re
import runpy
import unicodedata
from collections.abc import Collection
from functools import cache
from pathlib import Path

LONGEST = 200
#: Where the package is to be had; run by itself, since importing `hf_hyperattn` imports torch.
ADDRESS = Path(__file__).parents[1] / "hf_hyperattn" / "address.py"
SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$!#])")
PLAIN_CODE = re.compile(r"[\w .,:;=/()+\-\[\]{}\"'@%*^#~!?$]+", re.ASCII)


class Safe(str):
    """Markdown made by this package: printed by the templates as it is."""


def flat(value: object, longest: int = LONGEST) -> str:
    """``value`` on one line of at most ``longest`` characters, without control or invisible formatting characters."""
    kept = "".join(" " if char.isspace() else char for char in str(value))
    kept = "".join(char for char in kept if not unicodedata.category(char).startswith("C"))
    kept = " ".join(kept.split())
    return kept if len(kept) <= longest else kept[: longest - 1] + "…"


def text(value: object) -> Safe:
    """``value`` as literal Markdown text on one line; web addresses are not turned into links."""
    escaped = SPECIAL.sub(r"\\\1", flat(value).replace("&", "&amp;"))
    return Safe(
        re.sub(
            r"(?i)://|www\.", lambda m: m[0].replace(":", "&#58;").replace(".", "&#46;"), escaped
        )
    )


def code(value: object, longest: int = LONGEST) -> Safe:
    """``value`` as a code span that also holds inside a table cell."""
    line = flat(value, longest)
    if PLAIN_CODE.fullmatch(line):
        return Safe(f"`{line}`")
    entities = "".join(
        char if char.isalnum() or char in " .,_-" else f"&#{ord(char)};" for char in line
    )
    return Safe(f"<code>{entities.replace('_', '&#95;')}</code>")


def literal(value: object) -> Safe:
    """A string as a Python and JSON string literal, for the code blocks; one line, no backtick."""
    return Safe(json.dumps(flat(value)).replace("`", "\\u0060"))


def listing(value: object) -> object:
    """The members of a collection, sorted, with commas; any other value as it is."""
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return ", ".join(sorted(map(str, value)))
    return value


def finalize(value: object) -> str:
    """What Jinja prints for an expression: Safe strings as they are, everything else as escaped text."""
    return value if isinstance(value, Safe) else text(value)


@cache
def environment():
    """The Jinja environment of the card templates: strict about names, escaping by default."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    made = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters |= {
        "text": text,
        "code": code,
        "literal": literal,
        "listing": listing,
        "checked": Safe,
    }
    address = runpy.run_path(str(ADDRESS))
    made.globals |= {
        "install": lambda *more: Safe(address["install"](*more)),
        "source": Safe(address["SOURCE"]),
    }
    return made
