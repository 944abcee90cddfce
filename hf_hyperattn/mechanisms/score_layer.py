"""What the layers of all scores share: mode, heads, gates, identity, skipping, and what each head learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from ..engines.score import dot_score, upcast_for_grad
from ..readable import can_read
from .base import Host, HostCall, MechanismLayer, Plan


class ScoreLayer(MechanismLayer):
    """A score inside a host. Blend: S + g·S_room with g = 0 at first. Replace: S_room.

    Parameters, one number per query head, all zero at first: `gate` g (blend only), and for each name in `learned`
    `log_<name>`, the logarithm of that number over the one that the config has under the name.

    A room sets `space`, which is called with the learned numbers, each a tensor [H] or, where nothing is learned, the
    config's number, and returns what has `score(query, key, scale=None, gate=None, capped=False)`: a `PairScore` of one
    term with that gate and cap, which reads the host's product, scale · q·k, or for None its own.
    """

    honours_heads = True
    mixes_heads = False

    #: Numbers of the config of which every query head learns its own.
    learned: tuple[str, ...] = ()
    #: The parameters that all are zero where the layer changes nothing.
    gates: tuple[str, ...] = ("gate",)
    #: Whether `space_of(call, dtype)` gives what `space` gives, for a score that reads more of the call than vectors.
    reads_call = False

    space: Callable
    space_of: Callable
    gate: nn.Parameter | None

    def __init__(
        self, config, host: Host | None, mode: str = "replace", heads: tuple[int, ...] | None = None
    ):
        super().__init__(config, host, mode, heads)
        for name in self.gates:
            setattr(self, name, self.per_head(host) if mode == "blend" else None)
        for name in self.learned:
            setattr(self, f"log_{name}", self.per_head(host))

    def forward(self, plan: Plan) -> Plan:
        gate, call = self.gate, plan.call
        if gate is not None and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            plain = (
                type(gate) is nn.Parameter
                and not gate.is_meta
                and not is_functorch_wrapped_tensor(gate)
            )
            quiet = not torch.is_grad_enabled() or not self.learns()
            if (
                quiet
                and (plain or can_read(gate))
                and not gate.any()
                and (len(self.gates) == 1 or self.identical())
            ):
                return plan
        query, key, score = call.query, call.key, plan.score
        dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
        if torch.is_grad_enabled() and dtype not in (query.dtype, key.dtype):
            query, key = upcast_for_grad(query), upcast_for_grad(key)
            if (
                len(score.terms) == 1
                and score.raw_query is call.query
                and score.raw_key is call.key
            ):
                score = dot_score(query, key, call.scale)
        numbers = []
        for name in self.learned:
            start, log = getattr(self.config, name), getattr(self, f"log_{name}")
            numbers.append(start if log is None else start * torch.exp(log.to(dtype)))
        space = self.space_of(call, dtype) if self.reads_call else self.space(*numbers)
        if gate is None and self.heads is None:
            return replace(plan, score=space.score(query, key))
        whole = gate is not None and self.heads is None
        weight = gate.to(dtype) if whole else self.weight(gate, call, dtype)  # type: ignore[union-attr]
        assert weight is not None
        added = space.score(query, key, call.scale, weight, self.mode == "replace")
        if self.mode == "replace":
            score = score.weighted(1 - weight)
        return replace(plan, score=replace(score, terms=(*score.terms, *added.terms)))

    def weight(self, gate: Tensor | None, call: HostCall, dtype: torch.dtype) -> Tensor | None:
        """How much of the mechanism each head gets, [H]: its gate, if it has one, at the heads that are changed; None
        for all of it.
        """
        chosen = self.head_mask(call)
        weight = chosen if gate is None else gate if chosen is None else gate * chosen
        return None if weight is None else weight.to(dtype)

    def numbers(self, dtype: torch.dtype) -> list[Tensor | float]:
        """What heads learn, as it stands: [H] each, or the config's number where nothing is learned."""
        logs = ((getattr(self.config, n), getattr(self, f"log_{n}")) for n in self.learned)
        return [start if log is None else start * torch.exp(log.to(dtype)) for start, log in logs]

    def learns(self) -> bool:
        """Whether some parameter wants a gradient."""
        return any(p.requires_grad for p in self.parameters())

    def identical(self) -> bool:
        gates = (getattr(self, name) for name in self.gates)
        return self.mode == "blend" and not any(bool(g.any()) for g in gates if g is not None)
