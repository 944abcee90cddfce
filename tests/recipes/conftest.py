"""The recipes are scripts, not an installed package: they are found beside `recipes/finetune.py`, as it finds them."""

import sys

from .tiny import ROOT

sys.path.insert(0, str(ROOT / "recipes"))
