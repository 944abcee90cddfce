"""`python -m model_patches`: docs/families.md, written from the files and the tables of this package."""

from __future__ import annotations

import importlib
import textwrap
from collections import Counter

import transformers

from .census import model_types, modelling_files, state
from .refused import REFUSED, STAYING
from .table import FAMILIES, PARTS

HEAD = """# Families

Can my model be patched? Transformers {version} has {types} model types in its base and causal-LM mappings. This page
lists how the attention of each is reached, read from the source files (`model_patches/census.py`).
[Compatibility](compatibility.md) lists the tests of every type.

| state | model types | meaning |
| --- | --- | --- |
| routed | {routed} | the modelling file calls the attention interface itself |
| composite | {composite} | made of other models, no attention of its own |
| served | {served} | routed by a file of `model_patches`, on first use |
| refused | {refused} | out of reach, or without attention |

This page is written by `python -m model_patches > docs/families.md`; a test keeps it so.

## Served

The docstring of each file says what the family does differently, and how it is routed.

"""


def page() -> str:
    """The text of docs/families.md for the installed Transformers."""
    states = Counter(state(model_type) for model_type in model_types())
    counts = {name: states[name] for name in ("routed", "composite", "served", "refused")}
    text = HEAD.format(version=transformers.__version__, types=len(model_types()), **counts)
    text += "".join(_write_item(*row) for row in _served())
    text += "\n## Refused\n\nWhat a refused type has, or lacks:\n\n"
    text += "".join(_write_item(f"{reason}:", names) for reason, names in _by_reason(REFUSED))
    text += (
        "\n## Parts that stay as they are\n\nClasses of routed and served families that compute attention without "
        "the interface, and are\nnot changed. Such a class\n\n"
    )
    return text + "".join(_write_item(f"{reason}:", names) for reason, names in _by_reason(STAYING))


def _write_item(start: str, names: list[str], line: str = "") -> str:
    """Return an item of a list: its start, the model types or classes, and a sentence about them."""
    text = f"- {start} {', '.join(names)}{'. ' + line if line else ''}"
    wrapped = textwrap.wrap(
        text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapped) + "\n"


def _served():
    files: dict[str, list[str]] = {}
    for model_type, (_, file) in FAMILIES.items():
        # A file stays as long as the oldest supported Transformers needs it.
        note = "" if state(model_type) == "served" else " (in older releases; routed in this one)"
        files.setdefault(file, []).append(model_type + note)
    for stem, file in PARTS.items():
        if f"modeling_{stem}" in modelling_files():
            files.setdefault(file, []).append(f"{stem} (a part)")
    for file, names in sorted(files.items()):
        described = importlib.import_module(f"{__package__}.{file}").__doc__ or ""
        line = described.split("\n\n")[0].replace("\n", " ")
        yield f"`{file}.py`:", sorted(names), line


def _by_reason(table: dict[str, str]):
    reasons: dict[str, list[str]] = {}
    for name, reason in table.items():
        reasons.setdefault(reason, []).append(name)
    return sorted((reason, sorted(names)) for reason, names in reasons.items())


if __name__ == "__main__":
    print(page(), end="")
