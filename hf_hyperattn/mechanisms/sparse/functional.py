"""`sparse_attention`: sparse attention as a function.

It takes the arguments of `torch.nn.functional.scaled_dot_product_attention`, and a sparse rule for
each query head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ...config.fields import refuse
from ...engines import Options, attention, dot_score
from ...engines.options import check_broadcast
from ..checks import check_call
from ..selection.places import read_mask
from . import compiled
from .config import SparseConfig
from .masking import check_unpacked, mask_by_rules, read_text
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
    """Compute attention in which each head only attends to keys its rule selects.

    Args:
        query: [B, H, N, d], any floating dtype. Arithmetic is float32, float64 for float64 inputs.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value: [B, H or Hkv, M, dv].
        attn_mask: Bool (True = take part) or additive, broadcastable to [B, H, N, M]. Keys that it
            hides from every query and head are padding, which rules do not count. None: nothing is
            hidden.
        dropout_p: Probability that a weight is dropped, in [0, 1).
        is_causal: True: query i is token `first` + i, and sees no key after it. False: queries and
            keys are of one text, and a query sees keys on both sides, as in encoders.
        scale: The attention logit is scale · q·k; None: 1/sqrt(d).
        enable_gqa: Whether key and value may have fewer heads than the query.
        rules: A sparse rule for all heads, or one for each query head, such as `Pages()`,
            `Window()`, `Exact()`.
        first: The key that the first query belongs to; 0 if not causal.
        backend: The engine, a name out of `hf_hyperattn.engines.available_engines()`.

    Returns:
        [B, H, N, dv] in the query's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: An argument is out of range, or a rule selects by queries before `first`. Also
            raised with `is_causal=False` for a rule that needs causal attention, and for a mask
            that packs several texts into a row, which only `Exact()` and `Window(sinks=0)` may see.
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
    # The config checks the rules.
    head_rules = SparseConfig(rules).head_rules(heads, "this call")
    if not is_causal:
        head_rules.check_both_sides("this call")
    mask = check_broadcast("attn_mask", attn_mask, (batch, heads, n, key.shape[2]))
    options = Options(mask=mask, is_causal=is_causal, offset=first)
    scale = float(width**-0.5) if scale is None else scale
    score = dot_score(query, key, scale)
    with_dropout = replace(options, dropout_p=dropout_p)
    # Empty tensors, or rules that hide nothing: there is nothing to select.
    if not math.prod(score.shape) or head_rules.are_exact:
        return attention(score, value, with_dropout, backend=backend)[0].to(query.dtype)
    reading = read_mask(query, key, options, is_causal)
    text = read_text(query, key, reading, head_rules)
    check_unpacked(reading, head_rules)
    # The kernel first; it returns None for calls that it does not compute.
    out = compiled.attend_by_kernel(
        query, key, score, value, with_dropout, head_rules, text, backend=backend
    )
    if out is None:
        masked = mask_by_rules(query, key, scale, with_dropout, head_rules, text)
        out, _ = attention(score, value, masked, backend=backend)
    return out.to(query.dtype)
