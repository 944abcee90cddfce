"""docs/make_hierarchy.md names what there is; tests/docs runs its code."""

import re
from pathlib import Path

from hf_hyperattn.hierarchy.outlines import OUTLINES

PAGE = (Path(__file__).parents[2] / "docs" / "make_hierarchy.md").read_text(encoding="utf-8")


def test_every_level_is_named():
    assert set(re.findall(r'^\| `"(\w+)"`', PAGE, flags=re.M)) == set(OUTLINES)
