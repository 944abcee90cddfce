"""HSA over windows in plain operators alone, for exported programs: any batch, length and padding, O(N · M) memory.

A tree cannot be laid while a program is exported: it depends on the padding. So every number of a block stands at each
of its tokens: "the tokens of the same block" is a matrix, a mean over a block is a product with it, and a sum over the
tokens of other blocks counts each block as often as it has tokens, as the formulas of `reference` do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engines import Options, repeat_heads
from ...engines.options import position_mask
from ...engines.reference import apply_dropout, softmax_with_sinks
from ...geometry.scalars import at_least
from ...readable import is_exporting
from ..selection.places import text_starts
from .config import Rule
from .open_blocks import is_open

INF = float("inf")


def supports(query: Tensor, key: Tensor, options: Options, request: Any) -> bool:
    """Whether a call (see `request.Request`) is one over windows and whole rows, which this module can compute."""
    rule = request.rule
    whole = (
        isinstance(request.hierarchy, tuple)
        and query.shape[2] == key.shape[2]
        and not options.offset
    )
    plain_mask = options.mask is None or options.mask.dtype == torch.bool
    if rule.tying == "both":
        rest = (
            options.is_causal,
            options.window is not None,
            options.sinks is not None,
            options.dropout_p,
        )
        return whole and plain_mask and not any(rest)
    refines = any(
        rule.refine_top_k if isinstance(rule.refine_top_k, tuple) else (rule.refine_top_k,)
    )
    return whole and plain_mask and (request.is_causal or not refines)


def attend(
    query: Tensor, key: Tensor, value: Tensor, options: Options, request: Any
) -> tuple[Tensor, Tensor]:
    """`request.tied` of a call that `supports` allows: the output [B, H, N, dv] and the weights [B, H, N, M].

    What the mask hides from every query is padding. With tying="both" a mask that hides more is an error of the program
    too (RuntimeError); ONNX and ExecuTorch know none, and there its rows are NaN.
    """
    heads, n = query.shape[1], query.shape[2]
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    mask = (
        options.mask if options.mask is not None else query.new_ones(1, 1, 1, n, dtype=torch.bool)
    )
    real = mask.any(1).any(1).expand(query.shape[0], -1)  # [B, N]
    pairs = real[:, :, None] & real[:, None, :]
    place = (real.cumsum(1) - 1).masked_fill(~real, -1)
    blocks = [
        pairs & (place[:, :, None] // size == place[:, None, :] // size)
        for size in request.hierarchy
    ]
    if request.rule.tying == "both":
        single = torch.eye(n, dtype=torch.bool, device=query.device) & pairs
        weights = both_weights(
            query, key, [single, *blocks, pairs], options.bias, request.rule.keep_diagonal
        )
        more = (~mask & pairs[:, None]).flatten(1).any(1)
        if is_exporting():
            torch._assert_async(
                ~more.any(), "hsa with tying='both' got a mask that hides more than padding"
            )
        weights = weights.masked_fill(more[:, None, None, None], float("nan"))
        return weights @ value, weights
    visible, by_position = (
        mask & pairs[:, None],
        position_mask(options, (0, n), (0, n), query.device),
    )
    visible = visible if by_position is None else visible & by_position
    count = real.sum(1, keepdim=True)
    if options.mask is not None:  # which may pack several texts into a row
        same_text = in_same_text(visible.any(1), place, request.chunk) & pairs
        earlier = torch.ones(n, n, dtype=torch.bool, device=query.device).tril(-1)
        place, count = (same_text & earlier).sum(-1).masked_fill(~real, -1), same_text.sum(-1)
        blocks = [
            same_text & (place[:, :, None] // size == place[:, None, :] // size)
            for size in request.hierarchy
        ]
    levels = list(zip(request.hierarchy, blocks))
    logits = key_logits(query, key, levels, place, count, visible, options.bias, request.rule)
    weights = softmax_with_sinks(logits.masked_fill(~visible, -INF), options.sinks)
    return apply_dropout(weights, options) @ value, weights


def in_same_text(visible: Tensor, place: Tensor, chunk: int | None) -> Tensor:
    """Bool [B, N, N]: which tokens are of one text, as `Reading.find_texts` has it.

    Args:
        visible: bool [B, N, N], which real tokens see each other.
        place: int64 [B, N], the number of each token in its row.
        chunk: see `Request`.
    """
    n = visible.shape[-1]
    token = torch.arange(n, device=visible.device)
    first = torch.where(visible, token, n).amin(-1)
    last = torch.where(visible, token, -1).amax(-1)
    starts = text_starts(first, last) & (place >= 0)
    if chunk is not None:
        starts = starts & (place % chunk != 0)
    number = starts.to(torch.int64).cumsum(1)
    return number[:, :, None] == number[:, None, :]


def averaging(same: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, N, N]: what takes numbers of tokens to the means over their blocks, 0 for padding."""
    return same.to(dtype)[:, None] / same.sum(-1, keepdim=True).clamp_min(1)[:, None]


def both_weights(
    query: Tensor, key: Tensor, blocks: list[Tensor], bias: Tensor | None, keep_diagonal: bool
) -> Tensor:
    """P of tying="both", [B, H, N, N].

    Args:
        query, key: [B, H, N, d], of which the product is the score.
        blocks: bool [B, N, N], the tokens of the same block, from single tokens up to the root.
        bias: broadcastable to [B, H, N, N], added to the score, or None.
        keep_diagonal: whether a token attends to itself.
    """
    rho = (query * key).sum(-1)
    rho = rho if bias is None else rho + bias.diagonal(dim1=-2, dim2=-1)
    rho = rho if keep_diagonal else torch.full_like(rho, -INF)
    steps = []
    for same, parent in zip(blocks, blocks[1:]):
        means = averaging(same, query.dtype)
        logits = (means @ query) @ (means @ key).mT
        logits = logits if bias is None else logits + means @ bias @ means.mT
        logits = logits.masked_fill(~(parent & ~same)[:, None], -INF)
        every = torch.cat([logits, rho[..., None]], -1)
        top = at_least(every.amax(-1, keepdim=True), torch.finfo(every.dtype).min)
        log_z = (top + (every - top).exp().sum(-1, keepdim=True).log())[..., 0]
        alone = (
            log_z == -INF
        )  # nothing to attend to: padding, and a single child without its diagonal
        bottom = log_z.masked_fill(alone, 0.0)[..., None]
        steps.append(
            ((logits - bottom).exp(), (rho - bottom[..., 0]).exp().masked_fill(alone, 0.0))
        )
        size = parent.sum(-1).clamp_min(1)[:, None]
        rho = torch.where(parent[:, None], log_z[..., None, :], 0.0).sum(-1) / size
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
    """S' of tying="key", [B, H, N, N]: the score, and for tokens in a closed block its mean and the block bias.

    From the top down, `opened` are pairs whose blocks so far are open by their place, and `freed` those that stand
    closed since refinement opened the block above.

    Args:
        query, key, bias: as in `both_weights`.
        levels: sizes of windows, bottom first, and the tokens of the same one, bool [B, N, N].
        place: which real token of its text a token is, int64 [B, N]; -1 for padding.
        count: how many tokens its text has, int64 [B, N or 1].
        visible: bool [B, 1 or H, N, N].
        rule: how the call is tied.
    """
    per_head = lambda x: torch.as_tensor(x, device=query.device).reshape(-1, 1, 1)
    near, sinks, block_bias = per_head(rule.near), per_head(rule.sinks), per_head(rule.block_bias)
    total = query @ key.mT
    total = logits = total if bias is None else total + bias
    bottom = levels[0][0] if levels else 1
    span = lambda size: (start := place // size * size, torch.minimum(start + size, count) - 1)
    own_start, own_stop = (t[:, None, :, None] for t in span(bottom))
    opened, freed = torch.ones_like(visible), torch.zeros_like(visible)
    for size, same in reversed(levels):
        start, stop = (t[:, None, None, :] for t in span(size))
        means, tokens = averaging(same, query.dtype), same.sum(-1)[:, None, None, :]
        mean = query @ (means @ key).mT
        mean = mean if bias is None else mean + bias @ means.mT
        seen = visible.to(query.dtype) @ same.to(query.dtype)[:, None]
        open_here = same[:, None] | (seen < tokens) | (tokens < 2)
        open_here = open_here | is_open(start, own_start - stop, start - own_stop, near, sinks)
        closed = ((opened & ~open_here) | freed) & visible
        opened, freed = opened & open_here, torch.zeros_like(closed)
        if any(
            top_k := rule.refine_top_k
            if isinstance(rule.refine_top_k, tuple)
            else (rule.refine_top_k,)
        ):
            freed = closed & best(
                closed, mean + tokens.log(), same, start == place[:, None, None, :], top_k
            )
        logits = torch.where(closed & ~freed, mean + block_bias.to(mean.dtype), logits)
    return logits


def best(
    closed: Tensor, score: Tensor, same: Tensor, first: Tensor, top_k: tuple[int, ...]
) -> Tensor:
    """Bool [B, H, N, N]: whether a token's block is one of the `top_k` closed ones with the largest scores.

    Args:
        closed, score: [B, 1 or H, N, N] and [B, H, N, N], of the token's block.
        same: as in `key_logits`.
        first: bool [B, 1, 1, N], which tokens are the first of their blocks.
        top_k: one for all heads, or one a head.
    """
    most = min(max(top_k), closed.shape[-1])  # no more blocks than tokens
    score = torch.nn.functional.pad(
        score.masked_fill(~(closed & first), -INF), (0, most), value=-INF
    )
    rank = torch.arange(most, device=score.device) < torch.tensor(
        top_k, device=score.device
    ).reshape(-1, 1, 1)
    chosen = torch.zeros_like(score).scatter(
        -1, score.topk(most).indices, rank.to(score.dtype).expand_as(score[..., :most])
    )[..., : closed.shape[-1]]
    leader = same.int().argmax(-1)[:, None, None, :]  # the first token of the block
    return (
        chosen.gather(-1, leader.expand_as(chosen)) > 0
    )  # `closed` may be that of all heads at once
