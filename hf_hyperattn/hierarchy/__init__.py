"""Build trees over the tokens of a sequence.

Trees come from fixed windows, group ids, parent pointers, texts or images. This module shows
which classes describe a tree (`Tree`), its families, and the trees of a batch (`Hierarchy`).
"""

from .batch import Hierarchy, as_hierarchy
from .tree import Families, Tree

__all__ = ["Families", "Hierarchy", "Tree", "as_hierarchy"]
