"""Measure what hierarchical self-attention (HSA) would lose in a model, before changing anything.

The loss of a head is KL(tied attention ‖ its own attention) in nats, averaged over tokens. It is
measured on the queries and keys that the model computes for an input. With tying="both" it is a
certificate: no attention that is constant on the hierarchy's blocks comes closer (arXiv 2509.15448;
math in docs/hsa.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config.choice import Choice
from ..engines.options import read_visible
from ..hierarchy import Hierarchy
from ..integration import patch_model, unpatch_model
from ..integration.patching.patch import base_model
from ..mechanisms.base import HostCall, Plan
from ..mechanisms.hsa.certificate import loss_both, loss_key
from ..mechanisms.hsa.config import HsaConfig, Rule
from ..mechanisms.hsa.masks import lay_under_mask
from ..mechanisms.hsa.request import fit_hierarchy, linear_features
from ..mechanisms.selection.places import real_tokens
from .cost import patched_layers
from .perplexity import evaluation_mode


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
    mask, place = call.options.mask, None
    if mask is not None:
        reading = call.read_mask()
        only_padding = reading.real_if_only_padding is not None
        if only_padding or rule.tying == "key":
            hierarchy, place = lay_under_mask(hierarchy, reading, False, call.chunk)
        # A mask that only marks padding is the same as a hierarchy of the real tokens.
        mask = None if only_padding else mask
    if rule.tying == "both":
        loss = measure_both(query, key, hierarchy, rule, call, mask)
    else:
        loss = measure_key(query, key, hierarchy, rule, call, mask, place)
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


def measure_both(
    query: Tensor,
    key: Tensor,
    hierarchy: Hierarchy,
    rule: Rule,
    call: HostCall,
    mask: Tensor | None,
) -> Tensor:
    """Return the loss [B, H] of tying queries and keys."""
    if mask is not None:
        # This raises the error for a mask that hides more than padding.
        real_tokens(mask, query.shape[2])
    if call.options.window is not None:
        raise ValueError("tying='both' has no meaning under a sliding window; allowed: tying='key'")
    bias = call.options.bias
    # The features already contain the scale, so the factor of the logits is 1.
    return loss_both(
        query, key, hierarchy, 1.0, keep_diagonal=rule.keep_diagonal, position_bias=bias
    )


def measure_key(
    query: Tensor,
    key: Tensor,
    hierarchy: Hierarchy,
    rule: Rule,
    call: HostCall,
    mask: Tensor | None,
    place: Tensor | None,
) -> Tensor:
    """Return the loss [B, H] of tying keys."""
    mask = None if mask is None else read_visible(mask)
    return loss_key(
        query,
        key,
        hierarchy,
        1.0,
        # The 4D masks of Transformers include causality.
        is_causal=call.is_causal and mask is None,
        window=call.options.window,
        mask=mask,
        position_bias=call.options.bias,
        place=place,
        near=rule.near,
        sinks=rule.sinks,
        refine_top_k=rule.refine_top_k,
        block_bias=rule.block_bias,
    )
