"""Run Hierarchical Self-Attention inside an attention layer of a model.

This module shows which learned parameters HSA adds, and how a layer's call becomes a `Request`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...engines import Options, repeat_heads
from ..base import Host, HostCall
from ..selection.cache import EVICTING, KeepWindows
from ..selection.places import read_mask
from ..selection_layer import Result, SelectingCall, SelectionLayer
from .config import HsaConfig, Rule
from .request import Request, attend_hierarchically
from .tree.key import weighted_sum

# Longer than any sequence. With this as `near`, a head opens every block, so its attention is
# exact.
EVERYTHING = 2**31


class HsaLayer(SelectionLayer):
    """Attend to tokens and blocks of a hierarchy.

    Learned parameters, one number per query head, all zero at first: `gate` (blend only), and with
    tying="key" `block_bias`, which is added to the configured one.

    Raises:
        ValueError: tying="both" in a causal layer, numbers for another count of heads, or a layer
            with a softcap.
    """

    counts_keys = True
    settings = "HSA settings"
    advice = "run `hyperattn inject --length` on the original model for this length"
    kept_kind = KeepWindows
    learned = ("gate", "block_bias")

    def __init__(self, config: HsaConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        rule = None
        if host is not None:
            rule = config.rule(host.is_causal or self.grows, host.heads, host.name)
        # A softcap is a tanh of the logit: the logit of a mean key is then not the mean of the
        # logits.
        softcap = getattr(getattr(host, "config", None), "attn_logit_softcapping", None)
        if host is not None and softcap is not None:
            raise ValueError(
                f"hsa was given {host.name}, whose logits have a softcap (attn_logit_softcapping={softcap}), which is "
                "not linear in the keys; allowed: attention layers without softcap"
            )
        self.block_bias = self.per_head(host) if rule is not None and rule.tying == "key" else None

    def find_rules(self, first: int, count: int, total: int, is_causal: bool) -> Rule:
        """See `SelectionLayer.find_rules`.

        With tying="both" all heads are tied, and `weigh_heads` selects the heads.
        """
        rule = self.config.rule(is_causal or self.grows, total, "this call")
        if count < total:
            # Tensor parallelism: this process has only some of the heads.
            by_head = {
                name: numbers[first : first + count]
                for name, numbers in vars(rule).items()
                if isinstance(numbers, tuple)
            }
            rule = replace(rule, **by_head)
        if self.heads is None or rule.tying == "both":
            return rule
        near = rule.near if isinstance(rule.near, tuple) else (rule.near,) * count
        near = tuple(n if h in self.heads else EVERYTHING for h, n in enumerate(near, first))
        return replace(rule, near=near)

    def attend_selected(
        self, asked: SelectingCall, rules: Rule, parameters: dict[str, Tensor | None]
    ) -> Result:
        """See `SelectionLayer.attend_selected`."""
        call, score, options = asked.call, asked.score, asked.options
        if asked.backend != "auto":
            self._warn_once(
                f"set_backend(model, {asked.backend!r}) does not reach the tied attention of hsa, which has its own "
                "engines",
                "engine",
            )
        is_blended = self.weigh_heads(parameters["gate"], call, rules) is not None
        if asked.cache is not None and asked.cache.keep is not None and is_blended:
            raise ValueError(
                f"{EVICTING} has forgotten keys that full attention reads, with which hsa is blended; allowed: a "
                "cache that was made for this model, as it is patched now, or evict=False"
            )
        n, m = call.query.shape[2], call.key.shape[2]
        if self.grows and not call.is_causal and options.mask is None and n > 1:
            # In a prefix LM only a mask says what a query sees. Without one, every query sees every
            # key.
            options = replace(options, mask=call.query.new_ones(1, 1, n, m, dtype=torch.bool))
        learned = parameters["block_bias"]
        if learned is not None:
            learned = learned.to(score.dtype)
            start = rules.block_bias
            start = learned.new_tensor(start) if isinstance(start, tuple) else start
            rules = replace(rules, block_bias=learned + start)
        hierarchy = call.keywords.get("hierarchy")
        request = Request(
            hierarchy=self.config.windows if hierarchy is None else hierarchy,
            rule=rules,
            is_causal=call.is_causal or self.grows,
            weights=asked.weights,
            cache=asked.cache,
            reading=read_mask(
                call.query, call.key, options, call.is_causal, call.first, self.grows
            ),
            position_ids=call.keywords.get("position_ids"),
            # An indexer (DeepSeek's sparse attention) may hide any token.
            chunk=call.chunk if call.keywords.get("indices") is None else 1,
        )
        return attend_hierarchically(score, asked.value, options, request)

    def attend_blended(
        self, call, whole, parameters, score, value, options, backend="auto", weights=False
    ) -> Result:
        """See `SelectionLayer.attend_blended`."""
        out, shares = super().attend_blended(
            call, whole, parameters, score, value, options, backend, weights
        )
        return make_differentiable(out, shares, value, options)

    def weigh_heads(self, gate: Tensor | None, call: HostCall, rules: Rule) -> Tensor | None:
        """See `SelectionLayer.weigh_heads`."""
        if gate is None and rules.tying == "both":
            # `find_rules` cannot leave single heads exact here, so the layer blends by head.
            return self.head_mask(call)
        return super().weigh_heads(gate, call, rules)


def make_differentiable(
    out: Tensor, shares: Tensor | None, value: Tensor, options: Options
) -> Result:
    """Return the output as weights times values.

    A loss of the output then has a gradient by the weights.

    Args:
        out: [B, H, N, dv].
        shares: The weights [B, H, N, M] without dropout; None if they were not requested.
        value: [B, H or fewer, M, dv].
        options: Options of the call.

    Returns:
        The output and the weights.
    """
    if shares is None or not shares.requires_grad or options.dropout_p:
        return out, shares
    values = repeat_heads(value, shares.shape[1]).to(shares.dtype)
    return weighted_sum(shares, values).to(out.dtype), shares
