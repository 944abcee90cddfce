"""Sparse attention as a function, shaped like `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ...engines import Options, attention, dot_score
from ...engines.options import check_broadcast
from ...fields import refuse
from ..checks import check_call
from ..selection.places import read_mask
from . import compiled
from .config import SparseConfig
from .masking import check_unpacked, masked, text_of
from .rules import SparseRule


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rules: SparseRule | Sequence[SparseRule],
    first: int = 0,
    backend: str = "auto",
) -> Tensor:
    """Attention of which every query head computes the logits of the keys alone that its rule selects.

    Args:
        query: [B, H, N, d], any floating dtype. Arithmetic is float32, float64 for float64 inputs.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value: [B, H or Hkv, M, dv].
        attn_mask: bool (True = take part) or additive, broadcastable to [B, H, N, M]. Keys that it hides from every
            query and head are padding, which rules do not count.
        dropout_p: probability that a weight is dropped, in [0, 1).
        is_causal: True: query i is token `first` + i, and sees no key after it. False: queries and keys are of
            one text, and a query sees keys on both sides, as in encoders.
        scale: what q·k is multiplied with; None: 1/sqrt(d).
        enable_gqa: allow fewer heads of keys and values than of queries.
        rules: a sparse rule for all heads, or one for each query head, such as `Pages()`, `Window()`, `Exact()`.
        first: which key the first query belongs to; 0 if not causal.
        backend: the engine, a name out of `hf_hyperattn.engines.available_engines()`.

    Returns:
        [B, H, N, dv] in the query's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: an argument out of its range, a rule that selects by queries before `first`, a rule that needs
            causal attention with `is_causal=False`, or a mask that packs several texts into a row, which only `Exact()`
            and `Window(sinks=0)` may see.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    batch, heads, n, width = query.shape
    if not is_causal and n != key.shape[2]:
        raise ValueError(
            f"key has {key.shape[2]} tokens, query has {n}; with is_causal=False they are one text; allowed: equal "
            "numbers, or is_causal=True"
        )
    if type(first) is not int or not 0 <= first <= max(0, key.shape[2] - n):
        refuse("first", first, f"integers from 0 to {max(0, key.shape[2] - n)}, keys - queries")
    head_rules = SparseConfig(rules).head_rules(heads, "this call")
    if not is_causal:
        head_rules.check_both_sides("this call")
    mask = check_broadcast("attn_mask", attn_mask, (batch, heads, n, key.shape[2]))
    options = Options(mask=mask, is_causal=is_causal, offset=first)
    scale = float(width**-0.5) if scale is None else scale
    score = dot_score(query, key, scale)
    plain = replace(options, dropout_p=dropout_p)
    if not math.prod(score.shape) or head_rules.are_exact:  # nothing to select of
        return attention(score, value, plain, backend=backend)[0].to(query.dtype)
    reading = read_mask(query, key, options, is_causal)
    text, options = text_of(query, key, reading, head_rules), plain
    check_unpacked(reading, head_rules)
    out = compiled.attend(query, key, score, value, options, head_rules, text, backend=backend)
    if out is None:
        out, _ = attention(
            score, value, masked(query, key, scale, options, head_rules, text), backend=backend
        )
    return out.to(query.dtype)
