"""Sparse attention without training: every head sees the keys that a rule of its own selects."""

from ...registry import Mechanism, register
from .clusters import Clusters
from .config import SparseConfig
from .functional import sparse_attention
from .layer import SparseLayer
from .nested import NestedWindows
from .pages import Pages
from .rules import RULES, Exact, RuleCall, SparseRule, Window, sparse_rule
from .vertical_slash import VerticalSlash

__all__ = [
    "RULES",
    "Clusters",
    "Exact",
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
    )
)
