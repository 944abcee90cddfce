"""Hierarchical Self-Attention inside a host: the attention of the host, its logits tied over blocks of tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...engines import Options, PairScore, repeat_heads
from ..base import Host, HostCall, MechanismLayer, Plan
from ..pruned import refuse_pruned
from ..selection.cache import EVICTING, KeepWindows, layer_cache_of
from ..selection.places import read_mask
from .config import HsaConfig, Rule
from .request import Request, hierarchical
from .tree.key import weighted_sum

#: More tokens than any sequence has: with this as `near`, a head attends to every token by itself.
EVERYTHING = 2**31


class HsaLayer(MechanismLayer):
    """Blend: (1-g)·o + g·o_hsa with g = 0 at first, which computes both. Replace: o_hsa.

    Parameters, one number per query head, all zero at first: `gate` g (blend only), and with tying="key" `block_bias`,
    which is added to the configured one.

    Raises:
        ValueError: tying="both" in a causal host, numbers for another count of heads, or a host with a softcap.
    """

    honours_heads = True
    mixes_heads = False
    reads_forgotten = True
    counts_keys = True

    def __init__(self, config: HsaConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        # In a prefix LM rows grow as in causal attention, and a mask says what a query sees.
        self.host, self.grows = host, host is not None and host.grows
        rule = None if host is None else config.rule(host.is_causal or self.grows, host.heads, host.name)
        softcap = getattr(getattr(host, "config", None), "attn_logit_softcapping", None)
        if host is not None and softcap is not None:
            raise ValueError(
                f"hsa was given {host.name}, whose logits have a softcap (attn_logit_softcapping={softcap}), which is "
                "not linear in the keys; allowed: hosts without softcap"
            )
        self.gate = self.per_head(host) if mode == "blend" else None
        self.block_bias = self.per_head(host) if rule is not None and rule.tying == "key" else None

    def change(self, plan: Plan) -> Plan:
        # Read here: offload takes parameters away when this call returns, and the plan runs later.
        parameters = self.gate, self.block_bias
        return plan.change(attend=partial(self.attend, plan.call, plan.attend, parameters))

    def attend(
        self, call: HostCall, untied, parameters, score: PairScore, value: Tensor, options: Options, backend="auto",
        weights=False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The tied attention, beside the untied one where both are wanted.

        Args:
            untied: attends without ties.
            parameters: `gate` and `block_bias` as they stand.
            score, value, options, backend, weights: as in `engines.attention`.
        """
        self.warn_beyond(
            call,
            self.config.tuned_length,
            "HSA settings",
            "run `hyperattn inject --length` on the original model for this length",
        )
        if backend != "auto":
            self._warn_once(
                f"set_backend(model, {backend!r}) does not reach the tied attention of hsa, which has its own engines",
                "engine",
            )
        refuse_pruned(call, "hsa")
        n, m = call.query.shape[2], call.key.shape[2]
        if not call.is_causal:
            call.first_query("hsa", self.host)  # raises where nobody says which of the keys the queries are
        if self.grows and not call.is_causal and options.mask is None and n > 1:
            options = replace(options, mask=call.query.new_ones(1, 1, n, m, dtype=torch.bool))
        learned, block_bias = parameters
        gate, rule = self.weight(learned, call), self.rule(call, score, block_bias)
        if gate is not None and learned is None and rule.tying == "key":
            gate, rule = None, self.exact_elsewhere(rule, call)
        cache = layer_cache_of(call.key, call.value, "hsa", KeepWindows)
        if cache is not None and cache.keep is not None and gate is not None:
            raise ValueError(
                f"{EVICTING} has forgotten keys that the untied attention beside hsa reads; allowed: a cache that was "
                "made for this model, as it is patched now, or evict=False"
            )
        hierarchy = call.keywords.get("hierarchy")
        hierarchy = self.config.windows if hierarchy is None else hierarchy
        request = Request(
            hierarchy,
            rule,
            call.is_causal or self.grows,
            weights=weights,
            cache=cache,
            reading=read_mask(call.query, call.key, options, call.is_causal, call.first, self.grows),
            position_ids=call.keywords.get("position_ids"),
            chunk=call.chunk if call.keywords.get("indices") is None else 1,
        )
        tied = hierarchical(score, value, options, request)
        if gate is None:
            return differentiable(*tied, value, options)
        gate = gate.to(score.query.dtype)[:, None, None]
        (out, shares), (tied_out, tied_shares) = (
            untied(score, value, options, backend=backend, weights=weights),
            tied,
        )
        shares = None if shares is None else shares + gate * (tied_shares - shares)
        return differentiable(out + gate * (tied_out - out), shares, value, options)

    def weight(self, gate: Tensor | None, call: HostCall) -> Tensor | None:
        """How much of the tied attention each head gets; None for all of it."""
        heads = self.head_mask(call)
        return heads if gate is None else gate if heads is None else gate * heads

    def rule(self, call: HostCall, score: PairScore, block_bias: Tensor | None) -> Rule:
        """The config for this call, with the learned part of the block bias."""
        rank = call.heads
        rule = self.config.rule(
            call.is_causal or self.grows, call.query.shape[1] if rank is None else rank.total, "this call"
        )
        if rank is not None:
            by_head = {name: x for name, x in vars(rule).items() if isinstance(x, tuple)}
            rule = replace(rule, **{name: x[rank.first : rank.first + rank.count] for name, x in by_head.items()})
        if block_bias is None:
            return rule
        start = torch.as_tensor(rule.block_bias, dtype=score.dtype, device=score.device)
        return replace(rule, block_bias=start + block_bias.to(score.dtype))

    def exact_elsewhere(self, rule: Rule, call: HostCall) -> Rule:
        """The rule for the chosen heads, and for the others one under which nothing is tied."""
        near = rule.near if isinstance(rule.near, tuple) else (rule.near,) * call.query.shape[1]
        first = 0 if call.heads is None else call.heads.first
        near = tuple(n if h in (self.heads or ()) else EVERYTHING for h, n in enumerate(near, first))
        return replace(rule, near=near)

    def identical(self) -> bool:
        return self.gate is not None and not bool(self.gate.any())


def differentiable(
    out: Tensor, shares: Tensor | None, value: Tensor, options: Options
) -> tuple[Tensor, Tensor | None]:
    """The output as the product of the weights and the values, so that the loss has a gradient by the weights.

    Args:
        out: [B, H, N, dv].
        shares: the weights [B, H, N, M], or None where nobody asked for them; dropout is not in them.
        value: [B, H or fewer, M, dv].
    """
    if shares is None or not shares.requires_grad or options.dropout_p:
        return out, shares
    return weighted_sum(shares, repeat_heads(value, shares.shape[1]).to(shares.dtype)).to(out.dtype), shares
