"""The base class of mechanism layers, with `Host`, `HostCall` and `Plan`.

An attention layer's call arrives as a `HostCall`. A `Plan` starts as the attention of the original
model. The layer of each mechanism changes it, in the order of the stages. Then the plan runs on an
engine.
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
from ..utils.readable import can_read
from .selection.places import FirstKey, Reading, read_mask

logger = logging.getLogger("hf_hyperattn")

#: A model may run on this multiple of the length that its settings were chosen for without a
#: warning.
LONGER = 1.1


@dataclass(frozen=True)
class Host:
    """The facts about an attention layer that are known when it is patched.

    Args:
        name: Qualified name in the model.
        heads, kv_heads: Numbers of query heads and key/value heads.
        is_causal: Whether queries see only earlier keys.
        is_cross: Whether keys come from another sequence.
        layer_index: Position among the attention layers of its kind.
        config: The model's (sub-)config.
        width: Width of the hidden states that enter it; None if unknown.
        head_dim, value_dim: Width of a query or key, and of a value, of one head; None if unknown.
        rotary: How rotary positions were detected; "" without them.
        grows: Whether it belongs to a prefix LM, such as PaliGemma, whose masks let all of a prefix
            see itself. It is not causal, but keys come from a cache as the model generates.
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
    """The query heads that one rank computes under tensor parallelism.

    All ranks have the same number of heads.

    Args:
        total: Number of query heads of the attention layer.
        first: The rank's first query head.
        mesh: torch's device mesh of the ranks.
    """

    total: int
    first: int
    mesh: Any

    @property
    def count(self) -> int:
        """Number of query heads of the rank."""
        return self.total // self.mesh.size()

    def slice_rank(self, by_head: Tensor, axis: int = 0) -> Tensor:
        """Return the rank's part of a tensor.

        Args:
            by_head: A tensor ordered by query heads, or by key heads, along an axis.
            axis: This axis.
        """
        rows = by_head.shape[axis] // self.mesh.size()
        return by_head.narrow(axis, self.mesh.get_local_rank() * rows, rows)


@dataclass(frozen=True)
class HostCall:
    """One call of an attention layer.

    Args:
        query: [B, H, N, d], after the projections and rotary positions, without any scaling.
        key: [B, Hkv, M, d].
        value: [B, Hkv, M, dv].
        scale: The original attention logit is scale · q·k.
        is_causal: Whether queries see only earlier keys.
        options: Masks and the rest.
        keywords: Further keywords of the call (`position_ids`, `hierarchy`, ...).
        first: Where the keys begin and end.
        hidden: [B, N, width], the hidden states of the call, if a mechanism layer reads them; else
            None.
        heads: The query heads that are in `query`, under tensor parallelism; None: all.
        backend: The engine that the model was set to, see `set_backend`.
        chunk: The model's `attention_chunk_size`: under chunked attention, tokens see none before
            their chunk.
        cache: The Transformers cache of the call, if a mechanism layer keeps state on it; else
            None.
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

    @property
    def total_heads(self) -> int:
        """Number of query heads of the attention layer, on all ranks."""
        return self.query.shape[1] if self.heads is None else self.heads.total

    def slice_rank(self, by_head: Tensor) -> Tensor:
        """Return the rank's part of a tensor of all query heads [H, ...]."""
        return by_head if self.heads is None else self.heads.slice_rank(by_head)

    def read_mask(self, grows: bool = False) -> Reading:
        """Return the reading of the mask, whose results all layers of the model share.

        Args:
            grows: Whether the attention layer is of a prefix LM, see `Host`.
        """
        return read_mask(self.query, self.key, self.options, self.is_causal, self.first, grows)

    def first_query(self, mechanism: str, host: Host | None = None) -> int | Tensor:
        """Return the key that belongs to the first query, see `Places.start`.

        Args:
            mechanism: Its name, for the error.
            host: The attention layer; None if unknown, as for a mechanism that is used by name.

        Raises:
            ValueError: The key is unknown: the layer is not causal, and its keys may come from a
                cache or from another sequence.
        """
        # With equally many queries and keys, each query has its own key. Causal queries, and
        # queries of a prefix LM, are the newest tokens.
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
    """How a call will be computed. Mechanism layers return a changed copy.

    Args:
        call: Of the attention layer.
        score: Gives the attention logits.
        value: [B, Hkv, M, dv].
        options: Masks and the rest.
        attend: Computes attention from score, value and options; an engine's, or a mechanism's
            around it.
        after: Steps that change the output [B, H, N, dv], in order.
    """

    call: HostCall
    score: PairScore
    value: Tensor
    options: Options
    attend: Callable = attention
    after: tuple[Callable[[Tensor], Tensor], ...] = ()

    @classmethod
    def from_call(cls, call: HostCall) -> Plan:
        """Return the plan of the original model's attention."""
        score = dot_score(call.query, call.key, call.scale)
        return cls(call=call, score=score, value=call.value, options=call.options)

    def change(self, **changes) -> Plan:
        """Return the plan with these fields replaced."""
        return replace(self, **changes)

    def run(
        self, backend: str | None = None, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the plan.

        Args:
            backend: The engine; None: the one that the call names.
            weights: Whether to return the attention weights, too.

        Returns:
            The output [B, H, N, dv] in the query's dtype; the weights [B, H, N, M], or None.
        """
        backend = self.call.backend if backend is None else backend
        attend: Callable = partial(self.attend, backend=backend, weights=weights)
        # `attention` applies an aggregation of the values itself. Around a mechanism's own
        # attention it is applied here.
        if self.options.aggregation is not None and self.attend is not attention:
            attend = partial(average_columns, attend)
        # Autocast would round the products of scores.
        with full_precision(self.value.device):
            out, attention_weights = attend(self.score, self.value, self.options)
        for step in self.after:
            out = step(out)
        return out.to(self.call.query.dtype), attention_weights


class MechanismLayer(nn.Module):
    """Base of the layers of mechanisms, called as `layer(plan) -> plan`.

    Subclasses implement `change` and, if some parameter values make the layer the identity,
    `identical`. All parameters have at least one axis and start at zero.

    Args:
        config: Of the mechanism.
        host: The attention layer it is built for; None if the mechanism is used by name and has
            nothing to learn.
        mode: "blend" or "replace".
        heads: The query heads it changes; None: all. `head_mask` makes a mask of them.
    """

    #: Whether the layer only changes the heads in `heads`. If not, patching with heads= raises an
    #: error.
    honours_heads = False

    #: Whether the layer needs `HostCall.hidden`.
    reads_hidden = False
    #: Whether the layer needs `HostCall.cache`. State that a layer remembers of a conversation is
    #: stored on its cache.
    reads_cache = False
    #: Whether the layer can read a cache that evicts tokens, as the only mechanism and with
    #: mode="replace".
    reads_forgotten = False
    #: Whether the layer calls `refuse_pruned`. The first attention layer with such a mechanism
    #: needs `HostCall.cache`.
    counts_keys = False

    #: Whether a head's result depends on other heads. If not, a layer under tensor parallelism gets
    #: the queries, keys, values and parameter rows of its rank's heads only (`HostCall.heads`).
    #: Otherwise every rank computes all heads.
    mixes_heads = True
    #: Parameters that a layer without mixed heads nevertheless needs for all heads.
    for_all_heads: tuple[str, ...] = ()
    #: Whether the output of a query depends on other queries of the call. If not, a causal layer
    #: under context parallelism gets the queries of its rank only. Otherwise every rank computes
    #: all queries.
    mixes_queries = True

    def __init__(
        self, config, host: Host | None, mode: str = "replace", heads: tuple[int, ...] | None = None
    ):
        super().__init__()
        self.config = config
        self.mode = mode
        self.heads = heads
        #: Warnings that were logged. All layers of a patched model share one set
        #: (integration/patching/attach.py).
        self.warned: set[str] = set()

    def forward(self, plan: Plan) -> Plan:
        """Return the changed plan; the same object if nothing changes or learns."""
        return plan if self.idle() else self.change(plan)

    def change(self, plan: Plan) -> Plan:
        """Return the plan with the mechanism applied, also if that changes nothing."""
        raise NotImplementedError

    def identical(self) -> bool:
        """Return whether the layer changes nothing with its current parameters.

        The default is False.
        """
        return False

    def idle(self) -> bool:
        """Return whether a call can run as in the original model.

        That is so if nothing changes and no gradient is needed.
        """
        # A recorded call must hold for later parameters, too.
        if not can_read(*self.parameters()):
            return False
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        return not learning and self.identical()

    def per_head(self, host: Host | None) -> nn.Parameter | None:
        """Return a new parameter with one zero per query head.

        None for a layer without parameters.
        """
        return None if host is None else nn.Parameter(torch.zeros(host.heads))

    def warn_beyond(self, call: HostCall, made_for: int | None, what: str, cure: str) -> None:
        """Warn once per model if a row is longer than its settings were chosen for.

        Args:
            call: Of the attention layer. All keys count that its cache has room for.
            made_for: The length in tokens; None: any.
            what: Name of the settings, for the message.
            cure: Advice, for the message.
        """
        length = call.key.shape[2] + (call.first.index or 0)
        if made_for is not None and length > LONGER * made_for:
            # While a call is compiled, the length is a symbol.
            tokens = "more" if torch.compiler.is_compiling() else f"{length:,}"
            message = (
                f"the {what} of this model were chosen for {made_for:,} tokens, and it runs on {tokens}, where quality "
                f"was not measured and may be lower; {cure}, or shorten the texts"
            )
            self._warn_once(message, what)

    # A constant result keeps the compiler from tracing the logger and the set.
    @torch.compiler.assume_constant_result
    def _warn_once(self, message: str, what: str) -> bool:
        """Log a warning once per model; return whether it was logged now."""
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
        """Return [H], 1 at heads that are changed and 0 elsewhere; None if all are."""
        if self.heads is None:
            return None
        # Numbers in `self.heads` count over all ranks, so the mask is made for all heads and
        # sliced.
        mask = torch.zeros(call.total_heads, device=call.query.device, dtype=torch.float32)
        mask[list(self.heads)] = 1.0
        return call.slice_rank(mask)
