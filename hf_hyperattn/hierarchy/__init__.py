"""Trees over the tokens of a sequence: fixed windows, given ids or parents, the structure of texts and images."""

from .batch import Hierarchy, as_hierarchy
from .tree import Families, Tree

__all__ = ["Families", "Hierarchy", "Tree", "as_hierarchy"]
