"""What hierarchical attention would lose in a model, before anything is changed: layer by layer and head by head.

The loss of a head is the mean over tokens of KL(tied attention ‖ its own attention), in nats, measured on the queries
and keys that the model computes for an input. With tying="both" it is a certificate: no attention that is constant on
the hierarchy's blocks comes closer (arXiv 2509.15448; math in docs/hsa.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..engines.options import read_visible
from ..hierarchy import Hierarchy
from ..integration import patch_model, unpatch_model
from ..integration.patching import base_model
from ..mechanisms.base import HostCall, Plan
from ..mechanisms.hsa.certificate import loss_both, loss_key
from ..mechanisms.hsa.config import HsaConfig, Rule
from ..mechanisms.hsa.masks import hierarchy_for, restricted
from ..mechanisms.hsa.request import Request, lay_under_mask, linear_features
from ..mechanisms.selection.places import real_tokens
from ..selection import Choice
from .cost import patched_layers
from .perplexity import evaluation_mode


@dataclass(frozen=True)
class LayerLoss:
    """What one layer loses.

    Args:
        name: of the attention module.
        heads: for every query head the mean over tokens of KL(tied ‖ own attention), in nats.
        tokens: how many the mean is over.
    """

    name: str
    heads: tuple[float, ...]
    tokens: int

    @property
    def mean(self) -> float:
        """Mean over heads."""
        return sum(self.heads) / len(self.heads)


def certificate(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | Tensor,
    config: HsaConfig | None = None,
    *,
    hierarchy: Hierarchy | Tensor | None = None,
    layers: Choice = None,
) -> list[LayerLoss]:
    """The loss of every layer and head of a model on an input, were its attention tied as `config` says.

    The model runs once, with its own attention, and is left as it was found.

    Args:
        model: any model that `patch_model` takes, not patched.
        inputs: the model's arguments, such as a tokenizer returns them; or token ids [B, N].
        config: windows, tying, near, ...; None: `HsaConfig()`.
        hierarchy: in place of the windows.
        layers: as in `patch_model`.

    Returns:
        One `LayerLoss` a layer, in the model's order.

    Raises:
        ValueError: the model is patched, or its attention is of a kind that hierarchical attention does not allow.
    """
    config = config or HsaConfig()
    arguments: dict[str, Any] = (
        dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": torch.as_tensor(inputs)}
    )
    base = base_model(model)
    if hierarchy is not None:
        arguments["hierarchy"] = hierarchy
    losses: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def hook(_, arguments, keywords, name: str) -> None:
        call = arguments[0] if arguments else keywords["call"]
        loss, tokens = call_loss(call, config, name)
        losses[name] = losses.get(name, torch.zeros_like(loss)) + loss
        counts[name] = counts.get(name, 0) + tokens

    patch_model(model, config, layers=layers)
    try:
        hypers = dict(patched_layers(base))
        for name, hyper in hypers.items():  # the hooks go with the modules they are on
            hyper.register_forward_pre_hook(partial(hook, name=name), with_kwargs=True)
        with evaluation_mode(base), torch.no_grad():
            base(**arguments)
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
    """The loss of one call: sums over tokens and rows for every head, float64 [H], and the number of tokens."""
    rule = config.rule(call.is_causal, call.query.shape[1], name)
    options = call.options
    for what, there in (("softcap", options.softcap), ("attention sinks", options.sinks)):
        if there is not None:
            raise ValueError(
                f"{name} has {what}, for which the loss is not defined; allowed: layers without"
            )
    if call.query.shape[2] != call.key.shape[2]:
        raise ValueError(
            f"{name} was called with {call.query.shape[2]} queries and {call.key.shape[2]} keys; allowed: a "
            "whole text at once, without a cache"
        )
    query, key = linear_features(Plan.from_call(call).score)
    tree = call.keywords.get("hierarchy")
    hierarchy = hierarchy_for(
        config.windows if tree is None else tree, len(query), key.shape[2], call.is_causal
    )
    mask, place = options.mask, None
    if mask is not None:
        reading = call.read_mask()
        real = reading.real_if_only_padding
        if real is not None:
            hierarchy, mask = restricted(hierarchy, real), None
        elif rule.tying == "key":
            request = Request(hierarchy, rule, is_causal=False, chunk=call.chunk)
            hierarchy, place = lay_under_mask(hierarchy, reading, request)
    if rule.tying == "both":
        loss = _both(query, key, hierarchy, rule, call, mask)
    else:
        loss = _key(query, key, hierarchy, rule, call, mask, place)
    return loss.sum(0), sum(len(hierarchy.tokens_of(row)) for row in range(len(query)))


def _both(
    query, key, hierarchy: Hierarchy, rule: Rule, call: HostCall, mask: Tensor | None
) -> Tensor:
    if mask is not None:
        real_tokens(mask, query.shape[2])  # raises: this mask hides more than padding
    if call.options.window is not None:
        raise ValueError("tying='both' has no meaning under a sliding window; allowed: tying='key'")
    bias = call.options.bias
    return loss_both(
        query, key, hierarchy, 1.0, keep_diagonal=rule.keep_diagonal, position_bias=bias
    )


def _key(
    query,
    key,
    hierarchy: Hierarchy,
    rule: Rule,
    call: HostCall,
    mask: Tensor | None,
    place: Tensor | None,
) -> Tensor:
    mask = None if mask is None else read_visible(mask)
    options = {
        name: getattr(rule, name) for name in ("near", "sinks", "refine_top_k", "block_bias")
    }
    is_causal = call.is_causal and mask is None
    return loss_key(
        query,
        key,
        hierarchy,
        1.0,
        is_causal=is_causal,
        window=call.options.window,
        mask=mask,
        position_bias=call.options.bias,
        place=place,
        **options,
    )
