"""Rules for sparse attention: which keys each query head attends to.

The rules of `hf_hyperattn.SparseConfig`, and the decorator `rule` for rules of your own:

>>> from hf_hyperattn.rules import Pages, Window
>>> rules = [Window(near=64), Pages(top=8)]  # one for each query head
>>> config = hf_hyperattn.SparseConfig(rules=rules)
"""

from typing import TYPE_CHECKING

from .mechanisms.sparse.pages import PageRule, Pages
from .mechanisms.sparse.rules import Exact, RuleCall, SparseRule, Window, import_mask_rule
from .mechanisms.sparse.rules import sparse_rule as rule

if TYPE_CHECKING:
    from .mechanisms.sparse.mask_rules.clusters import Clusters
    from .mechanisms.sparse.mask_rules.nested import NestedWindows
    from .mechanisms.sparse.mask_rules.vertical_slash import VerticalSlash

__all__ = [
    "Clusters",
    "Exact",
    "NestedWindows",
    "PageRule",
    "Pages",
    "RuleCall",
    "SparseRule",
    "VerticalSlash",
    "Window",
    "rule",
]

# Rules without a kernel are imported on first use.
__getattr__ = import_mask_rule
