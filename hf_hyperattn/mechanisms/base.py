"""What a mechanism's layer gets and changes: the call of one attention host, and the plan of how it is computed.

A host's call arrives as a `HostCall`. `Plan` starts as the host's own attention; the layer of each mechanism, in the
order of the stages, changes what its stage is about; then the plan runs on an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..engines import Options, PairScore, attention, dot_score
from ..engines.dispatch import average_columns
from ..engines.options import full_precision
from ..readable import can_read
from .selection.places import FirstKey, Reading, read_mask

logger = logging.getLogger("hf_hyperattn")

#: How many times the length that settings were chosen for a model may run on without a warning.
LONGER = 1.1


@dataclass(frozen=True)
class Host:
    """What is known of a host when it is patched.

    Args:
        name: qualified name in the model.
        heads, kv_heads: numbers of query heads and key/value heads.
        is_causal: whether queries see only earlier keys.
        is_cross: whether keys come from another sequence.
        layer_index: position among the hosts of its kind.
        config: the model's (sub-)config.
        width: features of the hidden states that enter it; None where nothing tells.
        head_dim, value_dim: numbers in a query or key, and in a value, of one head; None where nothing tells.
        rotary: what shows that queries and keys are turned by rotary positions; "" where they are not.
        grows: whether it is not causal, and keys come from a cache as the model generates: a prefix LM, such as
            PaliGemma, whose masks let a prefix see itself whole.
    """

    name: str
    heads: int
    kv_heads: int
    is_causal: bool
    is_cross: bool
    layer_index: int
    config: object = None
    width: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    rotary: str = ""
    grows: bool = False


@dataclass(frozen=True)
class RankHeads:
    """Which query heads of a host a rank computes under tensor parallelism, where each has as many.

    Args:
        total: the query heads of the host.
        first: the first one that is the rank's.
        mesh: torch's device mesh of the ranks.
    """

    total: int
    first: int
    mesh: Any

    @property
    def count(self) -> int:
        """How many the rank has."""
        return self.total // self.mesh.size()

    def rows(self, by_head: Tensor, axis: int = 0) -> Tensor:
        """The part of the rank's heads, or key heads, of what is ordered by them along an axis."""
        rows = by_head.shape[axis] // self.mesh.size()
        return by_head.narrow(axis, self.mesh.get_local_rank() * rows, rows)


@dataclass(frozen=True)
class HostCall:
    """One call of a host's attention.

    Args:
        query: [B, H, N, d] as the projections (and rotary positions) left it, without any scaling.
        key: [B, Hkv, M, d].
        value: [B, Hkv, M, dv].
        scale: the host's logit is scale · q·k.
        is_causal: whether the host's queries see only earlier keys.
        options: masks and the rest.
        keywords: further keywords of the call (`position_ids`, `hierarchy`, ...).
        first: where the keys begin.
        hidden: [B, N, width], the hidden states that the host was called with, where a layer reads them, else None.
        heads: which of the host's query heads are in `query`, under tensor parallelism; None where all are.
        backend: the engine that the model was set to, see `set_backend`.
        chunk: the model's `attention_chunk_size`: under chunked attention tokens see none before their chunk.
        cache: the Transformers cache that the host was called with, where a layer keeps state on it, else None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    is_causal: bool
    options: Options
    keywords: dict = field(default_factory=dict)
    first: FirstKey = field(default_factory=FirstKey)
    hidden: Tensor | None = None
    heads: RankHeads | None = None
    backend: str = "auto"
    chunk: int | None = None
    cache: Any = None

    def read_mask(self, grows: bool = False) -> Reading:
        """Return what the mask says, which all layers of the model share.

        Args:
            grows: Of the host, see `Host`.
        """
        return read_mask(self.query, self.key, self.options, self.is_causal, self.first, grows)

    def first_query(self, mechanism: str, host: Host | None = None) -> int | Tensor:
        """Return the key that is the first query's own, see `Places.start`.

        Args:
            mechanism: Its name, for the error.
            host: Where the call is made; None where that is not known, as under a mechanism's name.

        Raises:
            ValueError: The call does not tell.
        """
        n, m = self.query.shape[2], self.key.shape[2]
        grows = host is not None and host.grows
        if n != m and not self.is_causal and not grows:
            raise ValueError(
                f"{mechanism} cannot tell which of {m} keys are those of the {n} queries in "
                f"{'this layer' if host is None else host.name}, which is not causal; allowed: self-attention over one "
                "sequence without a cache, choose such layers with layers=..., or for a prefix LM patch_model of the "
                "whole model that generates"
            )
        return self.read_mask(grows).places.start


@dataclass(frozen=True, eq=False)
class Plan:
    """How a call will be computed; layers return a changed copy."""

    call: HostCall
    score: PairScore
    value: Tensor
    options: Options
    attend: Callable = attention
    after: tuple[Callable[[Tensor], Tensor], ...] = ()

    @classmethod
    def of(cls, call: HostCall) -> Plan:
        """The host's own attention."""
        return cls(call, dot_score(call.query, call.key, call.scale), call.value, call.options)

    def change(self, **changes) -> Plan:
        """The plan with these fields in place of its own."""
        return replace(self, **changes)

    def run(
        self, backend: str | None = None, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The output [B, H, N, dv] in the query's dtype, and the weights where asked for.

        Args:
            backend: the engine; None for the one that the call names.
        """
        backend = self.call.backend if backend is None else backend
        attend: Callable = partial(self.attend, backend=backend, weights=weights)
        if self.options.aggregation is not None and self.attend is not attention:
            attend = partial(average_columns, attend)
        with full_precision(self.value.device):
            out, attention_weights = attend(self.score, self.value, self.options)
        for step in self.after:
            out = step(out)
        return out.to(self.call.query.dtype), attention_weights


class MechanismLayer(nn.Module):
    """Base of the layers, called as `layer(plan) -> plan`.

    Subclasses implement `change` and, where some setting of the parameters is the identity, `identical`. All
    parameters are 1-D or more and zero where the layer starts.

    Args:
        config: the mechanism's config.
        host: the host it is built for, or None where the mechanism is used by name and has nothing to learn.
        mode: "blend" or "replace".
        heads: the query heads it changes, None for all. `head_mask` makes a mask of them.
    """

    #: Whether the layer leaves heads alone that are not in `heads`. Where it does not say so, patching with heads= is
    #: refused.
    honours_heads = False

    #: Whether the layer needs `HostCall.hidden`.
    reads_hidden = False
    #: Whether the layer needs `HostCall.cache`. What a layer remembers of a conversation belongs to its cache.
    reads_cache = False
    #: Whether the layer, as the only one and with mode="replace", reads what a cache that forgets tokens has kept.
    reads_forgotten = False
    #: Whether `refuse_pruned` is called: of the hosts whose layers do, the first one needs `HostCall.cache`.
    counts_keys = False

    #: Whether a head's result depends on other heads. Where none does, a layer under tensor parallelism is called with
    #: the queries, keys and values of its rank's heads (`HostCall.heads`), and with the rows of its parameters that
    #: belong to them; else with those of all heads, on every rank.
    mixes_heads = True
    #: The parameters that a layer which mixes no heads needs for all heads all the same.
    for_all_heads: tuple[str, ...] = ()

    def __init__(
        self, config, host: Host | None, mode: str = "replace", heads: tuple[int, ...] | None = None
    ):
        super().__init__()
        self.config, self.mode, self.heads = config, mode, heads
        self.warned: set[str] = (
            set()
        )  # what the user was warned of; one set for all layers of a patched model

    def forward(self, plan: Plan) -> Plan:
        """The changed plan; the very same plan where the layer changes nothing and nothing is to be learned."""
        return plan if self.idle() else self.change(plan)

    def change(self, plan: Plan) -> Plan:
        """The plan with the mechanism in it, whether or not it changes anything."""
        raise NotImplementedError

    def identical(self) -> bool:
        """Whether the layer, as its parameters stand, changes nothing. The default answer is no."""
        return False

    def idle(self) -> bool:
        """Whether the call can be left to the host: identical, and no gradient is wanted; no where that is unknown."""
        if not can_read(*self.parameters()):
            return False
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        return not learning and self.identical()

    def per_head(self, host: Host | None) -> nn.Parameter | None:
        """A new parameter of one zero per query head; None for a layer without parameters."""
        return None if host is None else nn.Parameter(torch.zeros(host.heads))

    def warn_beyond(self, call: HostCall, made_for: int | None, what: str, cure: str) -> None:
        """Warn, once a model, where a row is longer than what settings were chosen for.

        Counted are the keys that a cache has room for; the compiler warns as it traces, and names no length.

        Args:
            made_for: tokens; None: for any length.
            what, cure: of the message: the settings, and what to do.
        """
        length = call.key.shape[2] + (call.first.index or 0)
        if made_for is not None and length > LONGER * made_for:
            tokens = "more" if torch.compiler.is_compiling() else f"{length:,}"
            message = (
                f"the {what} of this model were chosen for {made_for:,} tokens, and it runs on {tokens}, where quality "
                f"was not measured and may be lower; {cure}, or shorten the texts"
            )
            self._warn_once(message, what)

    @torch.compiler.assume_constant_result
    def _warn_once(self, message: str, what: str) -> bool:
        """Warn unless a layer of this model has warned of it; whether it did."""
        new = what not in self.warned
        if new:
            self.warned.add(what)
            logger.warning(f"hf_hyperattn: {message}")
        return new

    def reset_parameters(self) -> None:
        """Set every parameter to its starting value, zero."""
        for parameter in self.parameters():
            init.zeros_(parameter)

    def head_mask(self, call: HostCall) -> Tensor | None:
        """[H] with 1 at the call's heads that are changed and 0 elsewhere; None if all are."""
        if self.heads is None:
            return None
        total = call.query.shape[1] if call.heads is None else call.heads.total
        mask = torch.zeros(total, device=call.query.device, dtype=torch.float32)
        mask[list(self.heads)] = 1.0
        return mask if call.heads is None else call.heads.rows(mask)
