"""`tying="both"`: softmax(S)·V tied over sibling blocks, O(nodes · branching) (arXiv 2509.15448; math in docs/hsa.md).

Agrees with `reference.definition_both`; how it is computed says `up_down`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ....engines.graph_torch import refusing_second_derivatives
from ....engines.score import working_dtype
from ....hierarchy import Hierarchy
from ....readable import can_read
from .. import operator
from ..pairs import count_sibling_pairs
from .layout import layout_of
from .pair_terms import SiblingEmbeddings, pair_terms
from .up_down import UpDown


def attend_both(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    scale: float | None = None,
    **rest,
) -> Tensor:
    """The output of `attend_both_with_root` alone."""
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
    """Bidirectional attention tied over sibling blocks, for logits that are linear in features of the key.

    S_ij = scale · q_i·k_j + position_bias_ij, of which P takes means over pairs of blocks.

    Args:
        query: [B, H, N, d]. key: [B, Hkv, N, d], Hkv dividing H. value: [B, Hkv, N, dv]. Any floating dtype; the
            arithmetic is float64 where an input is, else float32.
        hierarchy: trees over the N tokens, one or one a row. Tokens in no tree are padding: nobody sees them, and
            their output is 0.
        scale: None for 1/sqrt(d).
        keep_diagonal: whether a token attends to itself.
        position_bias: [1 or B, 1 or H, N, N], finite at real tokens; costs its N² numbers.
        siblings: learned positions of the children of a family.

    Returns:
        The output [B, H, N, dv] and ρ(root) [B, H], both in the working dtype.

    Raises:
        ValueError: numbers of queries, keys and the hierarchy's tokens differ.
    """
    lengths = query.shape[2], key.shape[2], hierarchy.length
    if not lengths[0] == lengths[1] == lengths[2]:  # traced lengths are tensors
        raise ValueError(
            f"hsa with tying='both' was called with {lengths[0]} queries, {lengths[1]} keys and a hierarchy "
            f"over {lengths[2]} tokens; allowed: the same tokens as queries and as keys, all in the hierarchy"
        )
    dtype = working_dtype(query, key, value)
    factor: float = query.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v = (x.to(dtype) for x in (query, key, value))
    tables = None if siblings is None else siblings.by_kind()
    if can_read(q, k, v):
        return compute_both(q, k, v, hierarchy, factor, keep_diagonal, position_bias, tables)
    return call_operator(q, k, v, hierarchy, factor, keep_diagonal, position_bias, tables)


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
    """Output [B, H, N, dv] and ρ(root) [B, H] of features of one dtype; `tables`: sibling embeddings by kind."""
    layout, kv_heads = layout_of(hierarchy, len(query), query.device), key.shape[1]
    query = query.unflatten(1, (kv_heads, query.shape[1] // kv_heads)).transpose(2, 3)
    leaves = [layout.to_leaves(x) for x in (query, key, value)]
    terms = pair_terms(layout, kv_heads, position_bias, tables, query.dtype)
    made_of: Tensor | None = None
    if torch.is_grad_enabled():  # a number that is all tensors' and holds the memory of none
        made_of = torch.stack([t[..., :0].sum() for t in (*leaves, *terms) if t is not None]).sum()
    out, root = _Both.apply(layout, scale, keep_diagonal, made_of, *leaves, *terms)
    return layout.from_leaves(out).transpose(2, 3).flatten(1, 2), root.flatten(1)


#: Who refuses second derivatives, and what has them.
OWNER, INSTEAD = (
    "hsa with tying='both'",
    "allowed: first derivatives, or tying='key' with backend='torch'",
)


class _Both(torch.autograd.Function):
    """`UpDown` with its own backward: it needs O(nodes · d) memory however wide the families."""

    @staticmethod
    def forward(ctx, layout, scale, keep_diagonal, made_of, query, key, value, *terms):
        up_down = UpDown(layout, scale, keep_diagonal, query, key, value, terms)
        out = up_down.compute_output()
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
    """As `compute_both`, as one operator."""
    more = [] if position_bias is None else [("position_bias", position_bias)]
    more += [] if tables is None else [(f"table {kind}", table) for kind, table in tables.items()]
    sizes, parts = operator.flatten_hierarchy(hierarchy)
    numbers = [hierarchy.length, keep_diagonal, tables is not None]
    return operator.call_function("both", [query, key, value], more + parts, sizes, numbers, scale)


def _count_pairs(query, key, named, sizes, numbers) -> float:
    if sizes is not None:
        return query[1] * count_sibling_pairs(query[2], sizes)
    nodes, leaves = (
        sum(s[0] for name, s in named.items() if name.startswith(x)) for x in ("parents", "tokens")
    )
    return query[1] * nodes * nodes / (nodes - leaves)  # as if all families were of one size


@operator.register_function("both", lambda query, key, numbers: query.shape[:2], _count_pairs)
def _run_both_operator(tensors, named, sizes, numbers, scale) -> tuple[Tensor, Tensor]:
    length, keep_diagonal, siblings = numbers
    tables = {name[6:]: t for name, t in named if name.startswith("table ")} if siblings else None
    hierarchy = operator.unflatten_hierarchy(named, sizes, length)
    (query, key, value), bias = tensors, dict(named).get("position_bias")
    return compute_both(query, key, value, hierarchy, scale, bool(keep_diagonal), bias, tables)
