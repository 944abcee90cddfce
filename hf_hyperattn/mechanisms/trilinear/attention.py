"""Which way computes a call of three-way attention: the definition, or tiles."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...engines.choice import checked
from ...engines.options import Options, full_precision
from ...engines.score import dot_score
from ...readable import is_recorded
from .definition import simplicial
from .operator import blockwise
from .pairs import Windows

BACKENDS = ("auto", "reference", "blockwise")

#: Up to this many logits of one head `auto` takes the definition, which then has less to do than cutting tiles; and up
#: to this many of all heads and rows of the batch, which it holds at once.
DENSE_HEAD, DENSE_ALL = 2**14, 2**22


def attend(
    query: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    options: Options,
    windows: Windows,
    *,
    offset: Tensor | None = None,
    backend: str = "auto",
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Three-way attention of a scaled query; arguments as in `definition.simplicial`, all of one dtype.

    Args:
        offset: int64, of no axes, in place of `options.offset` where that is not known as a number.
        backend: out of `BACKENDS`.
        weights: also return the weights of j.

    Raises:
        ValueError: a mask that does not broadcast, or weights, or a mask that wants a gradient, from tiles.
    """
    options = checked(options, dot_score(query, keys[0], 1.0))
    learned = options.mask is not None and options.mask.requires_grad and torch.is_grad_enabled()
    if backend == "blockwise" and (weights or learned):
        what = "returns no weights" if weights else "gives no gradient to attn_mask"
        raise ValueError(f"backend='blockwise' {what}; use backend='reference' or 'auto'")
    dense = weights or learned or (not is_recorded() and small(query, keys[0].shape[2]))
    with full_precision(query.device):
        if backend == "reference" or (backend == "auto" and dense):
            options = options if offset is None else replace(options, offset=int(offset))
            out, found = simplicial(query, keys, values, options, windows)
            return out, found if weights else None
        return blockwise(query, keys, values, options, windows, offset), None


def small(query: Tensor, keys: int) -> bool:
    """Whether all logits at once are little beside the work of cutting tiles."""
    head = query.shape[2] * keys**2
    return head <= DENSE_HEAD and query.shape[0] * query.shape[1] * head <= DENSE_ALL
