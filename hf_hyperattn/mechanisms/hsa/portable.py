"""Compute HSA over windows with plain operators only.

Exported programs need this for any batch, length and padding. This module shows how a tree is
expressed by matrices over pairs of tokens, with O(N · M) memory.

A tree cannot be built during export, because it depends on the padding. Instead, each number of a
block is stored at each of its tokens. "The tokens of the same block" is a matrix, and a mean over a
block is a product with it. A sum over the tokens of other blocks counts each block once per token,
as the formulas of `reference` do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engines import Options, repeat_heads
from ...engines.options import position_mask
from ...engines.reference import apply_dropout, softmax_with_sinks
from ...geometry.scalars import at_least
from ...utils.readable import is_exporting
from ...utils.torch_private import assert_in_graph
from ..selection.places import text_starts
from .config import Rule, list_numbers
from .open_blocks import is_open

INF = float("inf")


def supports_call(query: Tensor, key: Tensor, options: Options, request: Any) -> bool:
    """Return whether this module can compute a call: windows over whole rows.

    Args:
        query, key: [B, H, N, d] and [B, Hkv, M, d].
        options: Options of the call.
        request: See `request.Request`.
    """
    rule = request.rule
    same_length = query.shape[2] == key.shape[2]
    whole = isinstance(request.hierarchy, tuple) and same_length and not options.offset
    plain_mask = options.mask is None or options.mask.dtype == torch.bool
    if rule.tying == "both":
        rest = (
            options.is_causal,
            options.window is not None,
            options.sinks is not None,
            options.dropout_p,
        )
        return whole and plain_mask and not any(rest)
    # Without causality, the last window of a level may be its only child, which refinement must not
    # count twice.
    refines = any(list_numbers(rule.refine_top_k))
    return whole and plain_mask and (request.is_causal or not refines)


def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, options: Options, request: Any
) -> tuple[Tensor, Tensor]:
    """Compute `request.attend_tied` for a call that `supports_call` allows.

    Tokens that the mask hides from every query are padding. With tying="both", a mask that hides
    more raises RuntimeError in the exported program. ONNX and ExecuTorch have no such error; there,
    rows of this mask are NaN.

    Returns:
        The output [B, H, N, dv], and the weights [B, H, N, M].
    """
    heads, n = query.shape[1], query.shape[2]
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    mask = options.mask
    if mask is None:
        mask = query.new_ones(1, 1, 1, n, dtype=torch.bool)
    # Windows count real tokens only.
    real = mask.any(1).any(1).expand(query.shape[0], -1)  # [B, N]
    pairs = real[:, :, None] & real[:, None, :]
    place = (real.cumsum(1) - 1).masked_fill(~real, -1)
    blocks = _same_windows(place, pairs, request.hierarchy)
    if request.rule.tying == "both":
        single = torch.eye(n, dtype=torch.bool, device=query.device) & pairs
        weights = both_weights(
            query, key, [single, *blocks, pairs], options.bias, request.rule.keep_diagonal
        )
        more = (~mask & pairs[:, None]).flatten(1).any(1)
        if is_exporting():
            assert_in_graph(
                ~more.any(), "hsa with tying='both' got a mask that hides more than padding"
            )
        weights = weights.masked_fill(more[:, None, None, None], float("nan"))
        return weights @ value, weights

    visible = mask & pairs[:, None]
    by_position = position_mask(options, (0, n), (0, n), query.device)
    visible = visible if by_position is None else visible & by_position
    count = real.sum(1, keepdim=True)
    if options.mask is not None:
        # The mask may pack several texts into a row. Then windows and sinks count from the start of
        # each text.
        same_text = in_same_text(visible.any(1), place, request.chunk) & pairs
        earlier = torch.ones(n, n, dtype=torch.bool, device=query.device).tril(-1)
        place = (same_text & earlier).sum(-1).masked_fill(~real, -1)
        count = same_text.sum(-1)
        blocks = _same_windows(place, same_text, request.hierarchy)
    levels = list(zip(request.hierarchy, blocks))
    logits = key_logits(query, key, levels, place, count, visible, options.bias, request.rule)
    weights = softmax_with_sinks(logits.masked_fill(~visible, -INF), options.sinks)
    return apply_dropout(weights, options) @ value, weights


def _same_windows(place: Tensor, pairs: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Return which tokens are in the same window, bool [B, N, N] for each size.

    Args:
        place: int64 [B, N], the number of each token in its row or text.
        pairs: bool [B, N, N], pairs that may be in the same window.
        sizes: Window sizes.
    """
    return [pairs & (place[:, :, None] // size == place[:, None, :] // size) for size in sizes]


def in_same_text(visible: Tensor, place: Tensor, chunk: int | None) -> Tensor:
    """Return bool [B, N, N]: which tokens are in the same text.

    The rule is the one of `Reading.find_texts`.

    Args:
        visible: bool [B, N, N], which real tokens see each other.
        place: int64 [B, N], the number of each token in its row.
        chunk: See `Request`.
    """
    n = visible.shape[-1]
    token = torch.arange(n, device=visible.device)
    first = torch.where(visible, token, n).amin(-1)
    last = torch.where(visible, token, -1).amax(-1)
    starts = text_starts(first, last) & (place >= 0)
    if chunk is not None:
        # At these tokens the layer's chunked attention starts again, which starts no text.
        starts = starts & (place % chunk != 0)
    number = starts.to(torch.int64).cumsum(1)
    return number[:, :, None] == number[:, None, :]


def make_averaging(same: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [B, 1, N, N] that averages tokens over their blocks.

    It is 0 for padding.

    Args:
        same: bool [B, N, N], the tokens of the same block.
        dtype: Of the result.
    """
    return same.to(dtype)[:, None] / same.sum(-1, keepdim=True).clamp_min(1)[:, None]


def both_weights(
    query: Tensor, key: Tensor, blocks: list[Tensor], bias: Tensor | None, keep_diagonal: bool
) -> Tensor:
    """Return the weights P of tying="both", [B, H, N, N].

    Args:
        query, key: [B, H, N, d], whose product is the score.
        blocks: bool [B, N, N], the tokens of the same block, from single tokens up to the root.
        bias: Added to the score, broadcastable to [B, H, N, N], or None.
        keep_diagonal: Whether a token attends to itself.
    """
    # Bottom-up: ρ and log Z of every level, each number stored at all tokens of its block.
    rho = (query * key).sum(-1)
    rho = rho if bias is None else rho + bias.diagonal(dim1=-2, dim2=-1)
    rho = rho if keep_diagonal else torch.full_like(rho, -INF)
    steps = []
    for same, parent in zip(blocks, blocks[1:]):
        means = make_averaging(same, query.dtype)
        logits = (means @ query) @ (means @ key).mT
        logits = logits if bias is None else logits + means @ bias @ means.mT
        # Siblings: the same parent, but another block.
        logits = logits.masked_fill(~(parent & ~same)[:, None], -INF)
        every = torch.cat([logits, rho[..., None]], -1)
        # `at_least` keeps the maximum finite if all logits are -inf: -inf - (-inf) would be NaN.
        top = at_least(every.amax(-1, keepdim=True), torch.finfo(every.dtype).min)
        log_z = (top + (every - top).exp().sum(-1, keepdim=True).log())[..., 0]
        # Padding, and a single child without its diagonal, have nothing to attend to.
        empty = log_z == -INF
        bottom = log_z.masked_fill(empty, 0.0)[..., None]
        shares = (logits - bottom).exp()
        inside = (rho - bottom[..., 0]).exp().masked_fill(empty, 0.0)
        steps.append((shares, inside))
        # The mean over tokens of the parent is Σ |B|/|A| log Z_B over its children.
        size = parent.sum(-1).clamp_min(1)[:, None]
        rho = torch.where(parent[:, None], log_z[..., None, :], 0.0).sum(-1) / size

    # Top-down: multiply the shares on the path of every token.
    weights, within = torch.zeros_like(steps[0][0]), torch.ones_like(rho)
    for shares, inside in reversed(steps):
        weights, within = weights + within[..., None] * shares, within * inside
    return weights + torch.diag_embed(within)


def key_logits(
    query,
    key,
    levels: list[tuple[int, Tensor]],
    place: Tensor,
    count: Tensor,
    visible: Tensor,
    bias,
    rule: Rule,
) -> Tensor:
    """Return S' of tying="key", [B, H, N, N].

    S' is the score, and for tokens of a closed block the mean of the block's scores plus the block
    bias.

    Args:
        query, key, bias: As in `both_weights`.
        levels: Window sizes, bottom first, each with the tokens of the same window, bool [B, N, N].
        place: int64 [B, N], the number of each real token in its text; -1 for padding.
        count: int64 [B, N or 1], the number of tokens of its text.
        visible: bool [B, 1 or H, N, N].
        rule: Settings of the tying.
    """
    settings = (rule.near, rule.sinks, rule.block_bias)
    near, sinks, block_bias = (
        torch.as_tensor(x, device=query.device).reshape(-1, 1, 1) for x in settings
    )
    total = query @ key.mT
    logits = total if bias is None else total + bias
    bottom = levels[0][0] if levels else 1

    def window_ends(size: int) -> tuple[Tensor, Tensor]:
        """Return the first and the last token of every token's window."""
        start = place // size * size
        return start, torch.minimum(start + size, count) - 1

    own_start, own_stop = (t[:, None, :, None] for t in window_ends(bottom))
    # From the top down: pairs whose blocks are open by their place, and pairs whose closed block
    # lies in a block that refinement has opened.
    opened, freed = torch.ones_like(visible), torch.zeros_like(visible)
    top_k = list_numbers(rule.refine_top_k)
    for size, same in reversed(levels):
        start, stop = (t[:, None, None, :] for t in window_ends(size))
        means = make_averaging(same, query.dtype)
        tokens = same.sum(-1)[:, None, None, :]
        mean = query @ (means @ key).mT
        mean = mean if bias is None else mean + bias @ means.mT
        seen = visible.to(query.dtype) @ same.to(query.dtype)[:, None]
        # Open: the query's own block, a partly hidden block, and a block of one token, which is
        # that token.
        open_here = same[:, None] | (seen < tokens) | (tokens < 2)
        open_here = open_here | is_open(start, own_start - stop, start - own_stop, near, sinks)
        closed = ((opened & ~open_here) | freed) & visible
        opened, freed = opened & open_here, torch.zeros_like(closed)
        if any(top_k):
            is_first = start == place[:, None, None, :]
            freed = closed & select_best(closed, mean + tokens.log(), same, is_first, top_k)
        logits = torch.where(closed & ~freed, mean + block_bias.to(mean.dtype), logits)
    return logits


def select_best(
    closed: Tensor, score: Tensor, same: Tensor, first: Tensor, top_k: tuple[int, ...]
) -> Tensor:
    """Return bool [B, H, N, N]: whether refinement opens a token's block.

    It opens the `top_k` closed blocks with the largest scores.

    Args:
        closed: bool [B, 1 or H, N, N], whether the token's block is closed.
        score: [B, H, N, N], score of the token's block.
        same: bool [B, N, N], the tokens of the same block.
        first: bool [B, 1, 1, N], which tokens are the first of their blocks.
        top_k: One number for all heads, or one per head.
    """
    n = closed.shape[-1]
    most = min(max(top_k), n)  # No more blocks than tokens.
    # Each block competes once, by its first token. Padding makes room for `topk` in rows with fewer
    # candidates.
    score = score.masked_fill(~(closed & first), -INF)
    score = torch.nn.functional.pad(score, (0, most), value=-INF)
    limit = torch.tensor(top_k, device=score.device).reshape(-1, 1, 1)
    rank = torch.arange(most, device=score.device) < limit
    best = rank.to(score.dtype).expand_as(score[..., :most])
    chosen = torch.zeros_like(score).scatter(-1, score.topk(most).indices, best)[..., :n]
    # A token is chosen if the first token of its block is. `closed` may have one axis entry for all
    # heads: use `chosen`.
    leader = same.int().argmax(-1)[:, None, None, :]
    return chosen.gather(-1, leader.expand_as(chosen)) > 0
