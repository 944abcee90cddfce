"""`tying="both"`: softmax(S)·V tied over sibling blocks, O(nodes · branching) (arXiv 2509.15448; math in docs/hsa.md).

Agrees with `definition.definition_both`; how it is computed says `passes`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines.score import working_dtype
from ...hierarchy import Hierarchy
from ...readable import can_read
from . import both_operator, programme
from .programme import Extras
from .siblings import SiblingEmbeddings


def both(
    query: Tensor, key: Tensor, value: Tensor, hierarchy: Hierarchy, scale: float | None = None, **rest
) -> Tensor:
    """The output of `both_with_root` alone."""
    return both_with_root(query, key, value, hierarchy, scale, **rest)[0]


def both_with_root(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    scale: float | None = None,
    *,
    keep_diagonal: bool = True,
    position_bias: Tensor | None = None,
    siblings: SiblingEmbeddings | None = None,
    row: Tensor | None = None,
    column: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Bidirectional attention tied over sibling blocks, for logits that are linear in features of the key.

    S_ij = scale · q_i·k_j + row_i + column_j + position_bias_ij, of which P takes means over pairs of blocks.

    Args:
        query: [B, H, N, d]. key: [B, Hkv, N, d], Hkv dividing H. value: [B, Hkv, N, dv]. Any floating dtype; the
            arithmetic is float64 where an input is, else float32.
        hierarchy: trees over the N tokens, one or one a row. Tokens in no tree are padding: nobody sees them, and
            their output is 0.
        scale: None for 1/sqrt(d).
        keep_diagonal: whether a token attends to itself.
        position_bias: [1 or B, 1 or H, N, N], finite at real tokens; costs its N² numbers.
        siblings: learned positions of the children of a family.
        row, column: statistics [B, H, N] and [B, Hkv or H, N].

    Returns:
        The output [B, H, N, dv] and ρ(root) [B, H], both in the working dtype.

    Raises:
        ValueError: numbers of queries, keys and the hierarchy's tokens differ.
    """
    _check(query, key, hierarchy)
    dtype = working_dtype(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if row is not None or column is not None:
        query, key, value, scale = _with_statistics(query, key, value, scale, row, column)
    q, k, v = (x.to(dtype) for x in (query, key, value))
    extras = Extras(position_bias)
    if siblings is not None:
        extras = Extras(position_bias, list(siblings.tables), siblings.names)
    compute = programme.run if can_read(q, k, v) else both_operator.run
    return compute(q, k, v, hierarchy, float(scale), keep_diagonal, extras)


def _with_statistics(query, key, value, scale: float, row: Tensor | None, column: Tensor | None):
    """Features whose product, unscaled, is scale · q·k + row + column: a statistic is one more column."""
    heads = query.shape[1]
    if column is not None and column.shape[1] == heads != key.shape[1]:
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    dtype = working_dtype(query, key)
    row = query.new_zeros(query.shape[:3]) if row is None else row
    column = key.new_zeros(key.shape[:3]) if column is None else column
    one = lambda x: torch.ones_like(x[..., :1], dtype=dtype)
    query = torch.cat([query.to(dtype) * scale, row.to(dtype)[..., None], one(query)], -1)
    key = torch.cat([key.to(dtype), one(key), column.to(dtype)[..., None]], -1)
    return query, key, value, 1.0


def _check(query: Tensor, key: Tensor, hierarchy: Hierarchy) -> None:
    lengths = query.shape[2], key.shape[2], hierarchy.length
    if not lengths[0] == lengths[1] == lengths[2]:
        raise ValueError(
            f"hsa with tying='both' was called with {lengths[0]} queries, {lengths[1]} keys and a hierarchy "
            f"over {lengths[2]} tokens; allowed: the same tokens as queries and as keys, all in the hierarchy"
        )
