"""Compute `tying="both"`: softmax(S)·V tied over sibling blocks.

The paper is arXiv 2509.15448; docs/hsa.md has the math. This module shows how a call reaches the
algorithm of `up_down`, and how it becomes an operator for the compiler. The cost is O(nodes ·
branching). Results agree with `reference.definition_both`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....engines.graph_torch import refusing_second_derivatives
from ....engines.score import working_dtype
from ....hierarchy import Hierarchy
from ....utils.readable import can_read
from .. import operator
from ..pairs import count_sibling_pairs
from .layout import layout_of
from .pair_terms import SiblingEmbeddings, pair_terms
from .up_down import UpDown

# A named tensor of the operator that is the sibling embeddings of a kind starts with this.
TABLE = "table "


def attend_both(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    scale: float | None = None,
    **rest,
) -> Tensor:
    """Return the output of `attend_both_with_root` without ρ(root)."""
    return attend_both_with_root(query, key, value, hierarchy, scale, **rest)[0]


def attend_both_with_root(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    scale: float | None = None,
    *,
    keep_diagonal: bool = True,
    position_bias: Tensor | None = None,
    siblings: SiblingEmbeddings | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend bidirectionally, tied over sibling blocks.

    Logits must be linear in features of the key. S_ij = scale · q_i·k_j + position_bias_ij. P uses
    the means of S over pairs of blocks.

    Args:
        query: [B, H, N, d], any floating dtype, as key and value. Arithmetic is float64 if an input
            is, else float32.
        key: [B, Hkv, N, d], Hkv dividing H.
        value: [B, Hkv, N, dv].
        hierarchy: Trees over the N tokens, one for all rows or one per row. Tokens in no tree are
            padding: no token attends to them, and their output is 0.
        scale: Factor of q·k; None: 1/sqrt(d).
        keep_diagonal: Whether a token attends to itself.
        position_bias: [1 or B, 1 or H, N, N], finite at real tokens, or None. It needs N² memory.
        siblings: Learned positions of the children of a family; None: no positions.

    Returns:
        The output [B, H, N, dv] and ρ(root) [B, H], both in the working dtype.

    Raises:
        ValueError: The numbers of queries, keys and the hierarchy's tokens differ.
    """
    queries, keys, tokens = query.shape[2], key.shape[2], hierarchy.length
    # Traced lengths may be tensors, so each pair is compared, not put into a set.
    if not queries == keys == tokens:
        raise ValueError(
            f"hsa with tying='both' was called with {queries} queries, {keys} keys and a hierarchy "
            f"over {tokens} tokens; allowed: the same tokens as queries and as keys, all in the hierarchy"
        )
    dtype = working_dtype(query, key, value)
    factor: float = query.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v = (x.to(dtype) for x in (query, key, value))
    tables = None if siblings is None else siblings.by_kind()
    compute = compute_both if can_read(q, k, v) else call_operator
    return compute(q, k, v, hierarchy, factor, keep_diagonal, position_bias, tables)


def compute_both(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    scale: float,
    keep_diagonal: bool,
    position_bias: Tensor | None = None,
    tables: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, N, dv] and ρ(root) [B, H] for features of one dtype.

    Args:
        query, key, value, hierarchy, keep_diagonal, position_bias: As in `attend_both_with_root`.
        scale: Factor of q·k.
        tables: Sibling embeddings by kind, or None.
    """
    layout, kv_heads = layout_of(hierarchy, len(query), query.device), key.shape[1]
    # [B, H, N, d] to [B, Hkv, N, G, d]: the G query heads of a key head stand together.
    query = query.unflatten(1, (kv_heads, query.shape[1] // kv_heads)).transpose(2, 3)
    leaves = [layout.to_leaves(x) for x in (query, key, value)]
    terms = pair_terms(layout, kv_heads, position_bias, tables, query.dtype)
    made_of: Tensor | None = None
    if torch.is_grad_enabled():
        # An empty sum depends on all tensors, and keeps the memory of none. Second derivatives are
        # refused through it.
        made_of = torch.stack([t[..., :0].sum() for t in (*leaves, *terms) if t is not None]).sum()
    out, root = _Both.apply(layout, scale, keep_diagonal, made_of, *leaves, *terms)
    # Back to [B, H, N, dv] and [B, H].
    return layout.from_leaves(out).transpose(2, 3).flatten(1, 2), root.flatten(1)


# For the message if someone asks for second derivatives.
OWNER = "hsa with tying='both'"
INSTEAD = "allowed: first derivatives, or tying='key' with backend='torch'"


class _Both(torch.autograd.Function):
    """Run `UpDown` with its own backward pass.

    It needs O(nodes · d) memory, however wide the families are.
    """

    @staticmethod
    def forward(ctx, layout, scale, keep_diagonal, made_of, query, key, value, *terms):
        up_down = UpDown(layout, scale, keep_diagonal, query, key, value, terms)
        out = up_down.compute_output()
        # Without gradients, the buffers are freed with this call.
        if any(ctx.needs_input_grad):
            ctx.up_down = up_down
            ctx.save_for_backward(made_of)
        return out

    @staticmethod
    def backward(ctx, grad_out, grad_root):
        with torch.no_grad():
            query, key, value, terms = ctx.up_down.compute_gradients(grad_out, grad_root)
        gradients = refusing_second_derivatives(
            [query, key, value, *terms],
            *ctx.saved_tensors,
            grad_out,
            grad_root,
            owner=OWNER,
            instead=INSTEAD,
        )
        return None, None, None, None, *gradients


def call_operator(query, key, value, hierarchy, scale, keep_diagonal, position_bias, tables):
    """Compute `compute_both` as one operator."""
    more = [] if position_bias is None else [("position_bias", position_bias)]
    # No table is different from no tables: see `pair_terms`. The last number tells them apart.
    more += [] if tables is None else [(TABLE + kind, table) for kind, table in tables.items()]
    length, sizes, parts = operator.flatten_hierarchy(hierarchy)
    numbers = [length, keep_diagonal, tables is not None]
    return operator.call_function("both", [query, key, value], more + parts, sizes, numbers, scale)


def _count_pairs(query, key, named, sizes, numbers) -> float:
    """Return how many logits a row has, from the shapes of its tensors."""
    heads, queries = query[1], query[2]
    if sizes is not None:
        return heads * count_sibling_pairs(queries, sizes)
    nodes, leaves = (
        sum(s[0] for name, s in named.items() if name.startswith(x)) for x in ("parents", "tokens")
    )
    # Shapes do not tell the sizes of families: count as if all families had the same size.
    return heads * nodes * nodes / (nodes - leaves)


def _run_both_operator(tensors, named, sizes, numbers, scale) -> tuple[Tensor, Tensor]:
    """Compute the operator "both" from the arguments that `call_operator` wrote."""
    query, key, value = tensors
    length, keep_diagonal, has_tables = numbers
    tables = None
    if has_tables:
        tables = {name.removeprefix(TABLE): t for name, t in named if name.startswith(TABLE)}
    hierarchy: Any = operator.unflatten_hierarchy(named, sizes, length)
    return compute_both(
        query,
        key,
        value,
        hierarchy,
        scale,
        keep_diagonal=bool(keep_diagonal),
        position_bias=dict(named).get("position_bias"),
        tables=tables,
    )


operator.FUNCTIONS["both"] = operator.Function(
    compute=_run_both_operator,
    shape=lambda query, key, numbers: query.shape[:2],
    pairs=_count_pairs,
)
