"""Sparse attention without training, by a rule for each head.

This module registers the mechanism and exports its config and rules.
"""

from typing import TYPE_CHECKING

from ...config.registry import Mechanism, register
from .config import SparseConfig
from .functional import sparse_attention
from .layer import SparseLayer
from .pages import PageRule, Pages
from .rules import RULES, Exact, RuleCall, SparseRule, Window, import_mask_rule, sparse_rule

if TYPE_CHECKING:
    from .mask_rules.clusters import Clusters
    from .mask_rules.nested import NestedWindows
    from .mask_rules.vertical_slash import VerticalSlash

__all__ = [
    "RULES",
    "Clusters",
    "Exact",
    "PageRule",
    "Pages",
    "RuleCall",
    "SparseConfig",
    "SparseRule",
    "NestedWindows",
    "VerticalSlash",
    "Window",
    "sparse_rule",
]

register(
    Mechanism(
        name="sparse",
        stage="structure",
        paper="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774; Efficient "
        "Streaming Language Models with Attention Sinks, arXiv 2309.17453; SparQ Attention, arXiv 2312.04985",
        config=SparseConfig,
        layer=SparseLayer,
        functions={"sparse_attention": sparse_attention},
        cross_attention=False,
        reads_hierarchy=False,
    )
)

# Rules without a kernel are imported on first use.
__getattr__ = import_mask_rule
