"""Offer Hierarchical Self-Attention as a function.

Its first arguments are those of `torch.nn.functional.scaled_dot_product_attention`. This module
shows the arguments of `hierarchical_attention`, and which combinations it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ...engines import Options, attention, dot_score
from ...engines.options import check_broadcast, full_precision
from ...hierarchy import Hierarchy
from ...hierarchy.windows import checked_sizes
from ...utils.readable import can_read, is_recorded
from ...utils.text import short
from ..checks import check_call, check_choice
from .config import TYINGS, HsaConfig, Rule, Tying
from .request import Request, attend_hierarchically
from .windowed.key import BACKENDS


def hierarchical_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    hierarchy: Hierarchy | Tensor | Sequence[int],
    tying: Tying = "both",
    keep_diagonal: bool = True,
    near: int | Sequence[int] = 0,
    sinks: int | Sequence[int] = 0,
    refine_top_k: int | Sequence[int] = 0,
    block_bias: float | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attend with logits tied over the blocks of a hierarchy.

    This is Hierarchical Self-Attention (arXiv 2509.15448). tying="both" is the paper's: one weight
    for every pair of sibling blocks. Of all such attention it is the closest to full attention (in
    KL). It takes O(nodes · branching) time. With tying="key", every query sees near tokens one by
    one and distant tokens as blocks, and opens the blocks that matter to it.

    Args:
        query: [B, H, N, d], any floating dtype. Arithmetic is float32, float64 for float64 inputs.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value: [B, H or Hkv, M, dv].
        attn_mask: bool (True = visible) or additive, broadcastable to [B, H, N, M]. With
            tying="both" it may hide padding only. With tying="key", a mask that hides more than
            padding (and, with `is_causal`, later tokens) costs O(N · M) time. Windows start at the
            first real token of a row, and with tying="key" again with every text that the mask
            packs into the row.
        dropout_p: Probability that a weight is dropped, in [0, 1); 0 with tying="both".
        is_causal: Query i sees keys j <= i; only with tying="key".
        scale: Factor of q·k; None: 1/sqrt(d).
        enable_gqa: Allow fewer heads of keys and values than of queries.
        hierarchy: Trees over the M keys: a `Hierarchy`, group ids [B, M, levels], or window sizes,
            bottom first.
        tying: "both" or "key".
        keep_diagonal: both: whether a token attends to itself; the paper's own setting is False.
        near: key: blocks less than this number of tokens from the query's bottom window are opened.
            An integer, or one per query head, as the next two.
        sinks: key: blocks that hold one of this number of first tokens are opened.
        refine_top_k: key: number of further blocks opened on each level, from the top down. The
            blocks with the largest logit of their mean key plus the logarithm of their size are
            opened.
        block_bias: key: added to the logit of closed blocks, a number or a tensor [H]; -inf drops
            them; None: 0.
        backend: "auto"; with tying="key" also "native" (a compiled kernel for CPU), "triton" (a
            kernel for GPUs, for causal calls over windows) and "torch" (any device, tree or mask).

    Returns:
        [B, H, N, dv] in the query's dtype. A query that sees no key gives 0. So does a query at a
        place that the mask hides from all queries.

    Raises:
        ValueError: An argument out of range or without meaning for the tying, or packed texts with
            fewer queries than keys. The message says what is allowed.
    """
    flags = dict(is_causal=is_causal, keep_diagonal=keep_diagonal)
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, **flags)
    check_choice("tying", tying, TYINGS)
    hierarchy = checked_hierarchy(hierarchy)
    # `HsaConfig` takes tuples only.
    near, sinks, refine_top_k = (
        tuple(x) if isinstance(x, Sequence) else x for x in (near, sinks, refine_top_k)
    )
    rule = _make_rule(
        is_causal,
        query.shape[1],
        tying=tying,
        keep_diagonal=keep_diagonal,
        near=near,
        sinks=sinks,
        refine_top_k=refine_top_k,
        block_bias=block_bias,
        backend=backend,
    )
    batch, heads, n, _ = query.shape
    mask = check_broadcast("attn_mask", attn_mask, (batch, heads, n, key.shape[2]))
    options = Options(mask=mask, is_causal=is_causal, dropout_p=dropout_p)
    if not (is_recorded() or (query.numel() and key.numel())):
        # Without queries or keys there is nothing to tie, and trees need at least one token.
        return attention(dot_score(query, key, scale), value, options)[0].to(query.dtype)
    # Arithmetic is at least float32, also under autocast.
    with full_precision(query.device):
        request = Request(hierarchy, rule, is_causal, backend)
        out, _ = attend_hierarchically(dot_score(query, key, scale), value, options, request)
    return out.to(query.dtype)


def _make_rule(
    is_causal: bool,
    heads: int,
    *,
    tying: Tying,
    block_bias: float | Tensor | None,
    backend: str,
    **settings,
) -> Rule:
    """Return the settings of the tying, after checking them.

    Args:
        is_causal: Whether attention is causal.
        heads: Number of query heads.
        tying, block_bias, backend: As in `hierarchical_attention`.
        settings: keep_diagonal, near, sinks and refine_top_k.

    Raises:
        ValueError: As in `hierarchical_attention`.
    """
    # A tensor of biases may need gradients, which a config cannot hold.
    learned = isinstance(block_bias, Tensor)
    bias = None if isinstance(block_bias, Tensor) else block_bias
    config = HsaConfig(windows=(), tying=tying, block_bias=bias, **settings)
    rule = config.rule(is_causal, heads, "this call")
    if said := config.unread({is_causal}):
        raise ValueError(said)
    check_choice("backend", backend, BACKENDS)
    # tying="both" has one implementation, and no closed blocks to which a bias could be added.
    if tying == "both" and (learned or backend != "auto"):
        name = "block_bias=a tensor" if learned else f"{backend=}"
        allowed = "None" if learned else "backend='auto'"
        raise ValueError(
            f"{name} has no meaning with tying='both'; allowed: {allowed}, or tying='key'"
        )
    if isinstance(block_bias, Tensor):
        check_heads(block_bias, heads)
        rule = replace(rule, block_bias=block_bias)
    return rule


def checked_hierarchy(hierarchy) -> Hierarchy | Tensor | tuple[int, ...]:
    """Return the hierarchy unchanged, or window sizes as a tuple.

    Raises:
        ValueError: Another type, or sizes that do not divide each other.
    """
    if isinstance(hierarchy, Hierarchy | Tensor):
        return hierarchy
    if not isinstance(hierarchy, list | tuple):
        raise ValueError(
            f"hierarchy is of type {type(hierarchy).__name__}; allowed: a Hierarchy, group ids [batch, keys, levels], "
            "or a tuple of window sizes, bottom first"
        )
    return checked_sizes(hierarchy)


def check_heads(block_bias: Tensor, heads: int) -> None:
    """Raise if a block bias has a wrong shape, or holds NaN or infinity.

    Allowed shapes are one number and [heads].
    """
    if block_bias.numel() != 1 and block_bias.shape != (heads,):
        raise ValueError(
            f"block_bias has shape {tuple(block_bias.shape)}; allowed: one number, or one per query head, ({heads},)"
        )
    # The comparison is False for NaN, too.
    if can_read(block_bias) and not bool((block_bias < float("inf")).all()):
        raise ValueError(
            f"block_bias={short(block_bias.tolist())} is not allowed; allowed: finite numbers or -inf"
        )
