"""Measure what hierarchical self-attention (HSA) would lose in a model, before changing anything.

The loss of a head is KL(tied attention ‖ its own attention) in nats, averaged over tokens. It is
measured on the queries and keys that the model computes for an input. With tying="both" it is a
certificate: no attention that is constant on the hierarchy's blocks comes closer (arXiv 2509.15448;
math in docs/hsa.md). This module shows how the loss is computed without N² memory.

    loss = Σ_i KL(P_i ‖ softmax(S_i))        over the tokens i of a row, one number per row and head, in nats
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config.choice import Choice
from ..engines.options import Options, position_mask, read_visible
from ..engines.score import repeat_heads
from ..hierarchy import Hierarchy
from ..integration import patch_model, unpatch_model
from ..integration.patching.patch import base_model
from ..mechanisms.base import HostCall, Plan
from ..mechanisms.hsa.config import HsaConfig, Rule
from ..mechanisms.hsa.masks import lay_under_mask
from ..mechanisms.hsa.request import fit_hierarchy, linear_features
from ..mechanisms.hsa.tree.both import attend_both_with_root
from ..mechanisms.hsa.tree.layout import layout_of
from ..mechanisms.hsa.windowed.key import attend_keys
from ..mechanisms.selection.places import real_tokens
from .cost import patched_layers
from .perplexity import evaluation_mode

# Logits that are formed at a time: 32 MiB of float64.
BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True)
class LayerLoss:
    """Loss of one attention layer.

    Args:
        name: Name of the attention module.
        heads: For every query head, KL(tied ‖ own attention) in nats, averaged over tokens.
        tokens: Number of tokens.
    """

    name: str
    heads: tuple[float, ...]
    tokens: int

    @property
    def mean(self) -> float:
        """Return the mean over heads."""
        return sum(self.heads) / len(self.heads)


def certificate(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | Tensor,
    config: HsaConfig | None = None,
    *,
    hierarchy: Hierarchy | Tensor | None = None,
    layers: Choice = None,
) -> list[LayerLoss]:
    """Measure the loss of every layer and head if its attention were tied as in `config`.

    The model runs once, with its own attention, and is left unchanged.

    Args:
        model: An unpatched model that `patch_model` accepts.
        inputs: Keyword arguments of the model, as a tokenizer returns them, or token ids [B, N].
        config: Settings of the tying. None: `HsaConfig()`.
        hierarchy: Used instead of the windows of `config`. None: use the windows.
        layers: Selection of layers, as in `patch_model`. None: all layers.

    Returns:
        One `LayerLoss` per layer, in the order of the model.

    Raises:
        ValueError: The model is patched, or its attention does not allow HSA.
    """
    config = config or HsaConfig()
    base = base_model(model)
    keywords: dict[str, Any] = (
        dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": torch.as_tensor(inputs)}
    )
    if hierarchy is not None:
        keywords["hierarchy"] = hierarchy
    losses: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add_loss(_, arguments, call_keywords, name: str) -> None:
        call = arguments[0] if arguments else call_keywords["call"]
        loss, tokens = call_loss(call, config, name)
        # A layer may be called more than once, for example if layers share weights.
        losses[name] = losses.get(name, torch.zeros_like(loss)) + loss
        counts[name] = counts.get(name, 0) + tokens

    # With gates at 0, the patched model still computes its own attention.
    patch_model(model, config, layers=layers)
    try:
        hypers = dict(patched_layers(base))
        # Unpatching removes these modules, and the hooks with them.
        for name, hyper in hypers.items():
            hyper.register_forward_pre_hook(partial(add_loss, name=name), with_kwargs=True)
        with evaluation_mode(base), torch.no_grad():
            base(**keywords)
    finally:
        unpatch_model(model)
    for name in hypers:
        if name not in losses:
            raise ValueError(f"{name} was not run on these inputs; allowed: layers that are")
    return [
        LayerLoss(name, tuple((loss / counts[name]).tolist()), counts[name])
        for name, loss in losses.items()
    ]


def call_loss(call: HostCall, config: HsaConfig, name: str) -> tuple[Tensor, int]:
    """Compute the loss of one call.

    Args:
        call: The call of an attention layer.
        config: Settings of the tying.
        name: Name of the layer, for errors.

    Returns:
        For every head, the sum over tokens and rows, float64 [H], and the number of tokens.

    Raises:
        ValueError: The loss is not defined for this call.
    """
    rule = config.rule(call.is_causal, call.query.shape[1], name)
    check_call(call, name)
    query, key = linear_features(Plan.from_call(call).score)
    tree = call.keywords.get("hierarchy")
    hierarchy = fit_hierarchy(
        config.windows if tree is None else tree, len(query), key.shape[2], call.is_causal
    )
    options, place = call.options, None
    mask = options.mask
    if mask is not None:
        reading = call.read_mask()
        only_padding = reading.real_if_only_padding is not None
        if only_padding or rule.tying == "key":
            hierarchy, place = lay_under_mask(hierarchy, reading, False, call.chunk)
        # A mask that only marks padding is the same as a hierarchy of the real tokens.
        mask = None if only_padding else read_visible(mask)
    if rule.tying == "both":
        if options.mask is not None and mask is not None:
            # This raises the error for a mask that hides more than padding.
            real_tokens(options.mask, query.shape[2])
        if options.window is not None:
            raise ValueError(
                "tying='both' has no meaning under a sliding window; allowed: tying='key'"
            )
        loss = loss_both(query, key, hierarchy, rule, options)
    else:
        # The 4D masks of Transformers include causality.
        is_causal = call.is_causal and mask is None
        options = replace(options, mask=mask, is_causal=is_causal)
        loss = loss_key(query, key, hierarchy, rule, options, place)
    tokens = sum(len(hierarchy.tokens_of(row)) for row in range(len(query)))
    return loss.sum(0), tokens


def check_call(call: HostCall, name: str) -> None:
    """Raise ValueError if the loss is not defined for a call."""
    options = call.options
    for feature, value in (("softcap", options.softcap), ("attention sinks", options.sinks)):
        if value is not None:
            raise ValueError(
                f"{name} has {feature}, so the loss is not defined; allowed: layers without"
            )
    if call.query.shape[2] != call.key.shape[2]:
        raise ValueError(
            f"{name} was called with {call.query.shape[2]} queries and {call.key.shape[2]} keys; "
            "allowed: a whole text at once, without a cache"
        )


def loss_both(
    query: Tensor, key: Tensor, hierarchy: Hierarchy, rule: Rule, options: Options
) -> Tensor:
    """Return the loss of `tying="both"`, [B, H], by a closed form.

    P is optimal among all matrices that are constant on sibling blocks. Its loss is therefore
    Σ_i log Σ_j exp(S_ij) - N·ρ(root). Without the diagonal, the softmax has none either, and a row
    of one token has loss 0. Padding is ignored.

    Args:
        query, key, hierarchy: As in `loss_key`.
        rule: `keep_diagonal` is read.
        options: `bias` is read.
    """
    # The loss is the difference of two large sums. In float32, most of its digits would cancel.
    query, key = query.double(), key.double()
    # Only ρ(root) is needed, so the values are a single column.
    _, root = attend_both_with_root(
        query,
        key,
        key[..., :1],
        hierarchy,
        1.0,
        keep_diagonal=rule.keep_diagonal,
        position_bias=options.bias,
    )
    real = _find_real_tokens(hierarchy, query)
    total = torch.zeros_like(root)
    for rows, logits in _logit_blocks(query, key, options.bias):
        logits = logits.masked_fill(~real[:, None, None], float("-inf"))
        # Compare with the softmax that has no diagonal either.
        if not rule.keep_diagonal:
            logits.diagonal(offset=rows.start, dim1=-2, dim2=-1).fill_(float("-inf"))
        total += logits.logsumexp(-1).masked_fill(~real[:, None, rows], 0.0).sum(-1)
    # Without its diagonal, a row of one token attends to nothing, and ρ(root) is -inf.
    return torch.where(root.isneginf(), 0.0, total - real.sum(-1, keepdim=True) * root)


def loss_key(
    query: Tensor,
    key: Tensor,
    hierarchy: Hierarchy,
    rule: Rule,
    options: Options,
    place: Tensor | None = None,
) -> Tensor:
    """Return the loss of `tying="key"`, [B, H], from the attention weights.

    Args:
        query: [B, H, N, d], scaled.
        key: [B, Hkv, N, d], of the same tokens.
        hierarchy: Trees over these tokens; tokens in no tree are padding.
        rule: Settings of the tying.
        options: Its mask is bool [1 or B, 1 or H, N, N]; None if it hides padding only.
        place: As in `attend_keys`.
    """
    query, key = query.double(), key.double()
    bias = None if options.bias is None else options.bias.double()
    real = _find_real_tokens(hierarchy, query)
    length = query.shape[2]
    total = query.new_zeros(query.shape[:2])
    for rows, logits in _logit_blocks(query, key, bias):
        part = replace(
            options,
            offset=rows.start,
            mask=_select_rows(options.mask, rows),
            bias=_select_rows(bias, rows),
        )
        # Only the weights are needed, so the values are a single column.
        _, P = attend_keys(
            query[:, :, rows],
            key,
            key[..., :1],
            hierarchy,
            rule,
            part,
            scale=1.0,
            weights=True,
            place=place,
        )
        assert P is not None
        # The softmax hides the same tokens as tied attention.
        hidden = ~real[:, None, None]
        seen = position_mask(part, (0, len(logits[0, 0])), (0, length), query.device)
        for t in (seen, part.mask):
            hidden = hidden if t is None else hidden | ~t
        full = torch.log_softmax(logits.masked_fill(hidden, float("-inf")), -1)
        # P log P - P log Q. Hidden tokens have P = 0 and log Q = -inf, whose product would be NaN.
        terms = torch.where(P > 0, torch.xlogy(P, P) - P * full, 0.0)
        total += terms.sum(-1).masked_fill(~real[:, None, rows], 0.0).sum(-1)
    return total


def _find_real_tokens(hierarchy: Hierarchy, query: Tensor) -> Tensor:
    """Return bool [B, N]: the tokens that are leaves of the hierarchy."""
    layout = layout_of(hierarchy, len(query), query.device)
    ones = query.new_ones(len(query), 1, query.shape[2])
    return layout.from_leaves(layout.to_leaves(ones))[:, 0] > 0


def _select_rows(t: Tensor | None, rows: slice) -> Tensor | None:
    """Return the rows of a mask or bias [..., N, N], or None."""
    return t if t is None else t[..., rows, :]


def _logit_blocks(
    query: Tensor, key: Tensor, position_bias: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and their logits S, [B, H, n, N], block after block."""
    batch, heads, queries, _ = query.shape
    step = max(1, BLOCK_ELEMENTS // (batch * heads * key.shape[2]))
    columns = repeat_heads(key, heads).transpose(-1, -2)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        logits = query[:, :, rows] @ columns
        yield rows, logits if position_bias is None else logits + position_bias[..., rows, :]
