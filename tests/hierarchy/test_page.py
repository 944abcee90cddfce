"""docs/hierarchy.md does what it says: its code runs."""

import re
from pathlib import Path

from hf_hyperattn.hierarchy.outlines import OUTLINES

PAGE = (Path(__file__).parents[2] / "docs" / "hierarchy.md").read_text(encoding="utf-8")


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert len(blocks) >= 6
    names = {}
    for block in blocks:
        exec(compile(block, "docs/hierarchy.md", "exec"), names)


def test_every_level_is_named():
    assert set(re.findall(r'^\| `"(\w+)"`', PAGE, flags=re.M)) == set(OUTLINES)
