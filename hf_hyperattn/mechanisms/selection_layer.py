"""`SelectionLayer`: the base of the layers of HSA and sparse rules.

It finds the rules of the heads, checks the call, and blends the result with full attention.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..engines import Options, PairScore
from .base import Host, HostCall, MechanismLayer, Plan
from .call_cache import find_layer_cache, refuse_pruned
from .selection.cache import LayerCache

#: The output [B, H, N, dv], and the weights [B, H, N, M], or None if they were not requested.
Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class SelectingCall:
    """A call of an attention layer whose rules select keys.

    Args:
        call: Of the attention layer.
        whole: Attends to all keys, as the original model does.
        score, value, options, backend, weights: As in `engines.attention`.
        cache: The cache that keys and values come from; None if unknown.
    """

    call: HostCall
    whole: Callable
    score: PairScore
    value: Tensor
    options: Options
    backend: str
    weights: bool
    cache: LayerCache | None = None

    def attend_whole(self) -> Result:
        """Return full attention."""
        return self.whole(
            self.score, self.value, self.options, backend=self.backend, weights=self.weights
        )


class SelectionLayer(MechanismLayer):
    """Base of the layers of HSA and sparse rules.

    mode="replace" returns o_selected, the attention to selected keys. mode="blend" computes both
    and returns (1-g)·o + g·o_selected, with g = 0 at the start. Subclasses define the rules of the
    heads (`find_rules`) and compute o_selected (`attend_selected`).
    """

    honours_heads = True
    mixes_heads = False
    mixes_queries = False
    reads_forgotten = True

    #: The name of the settings and the advice, for `warn_beyond`.
    settings: ClassVar[str]
    advice: ClassVar[str]
    #: The type of `LayerCache.keep` that the layer can read, for caches that evict.
    kept_kind: ClassVar[type]
    #: The attributes that hold the layer's parameters; an attribute may be None.
    learned: ClassVar[tuple[str, ...]] = ("gate",)

    def __init__(
        self, config, host: Host | None, mode: str = "replace", heads: tuple[int, ...] | None = None
    ):
        super().__init__(config, host, mode, heads)
        self.host = host
        # In a prefix LM, rows grow as in causal attention, and the mask tells which keys a query
        # sees.
        self.grows = host is not None and host.grows
        self.gate = self.per_head(host) if mode == "blend" else None
        #: Results of `find_rules`, by its arguments.
        self.found: dict[tuple, Any] = {}

    @abstractmethod
    def find_rules(self, first: int, count: int, total: int, is_causal: bool) -> Any:
        """Return the rules of some heads.

        Heads outside `self.heads` get rules that select everything.

        Args:
            first, count: The heads first ... first + count - 1.
            total: Number of query heads of the attention layer.
            is_causal: Whether queries see no key after their own.
        """

    def selects_everything(self, rules: Any) -> bool:
        """Return whether these rules leave attention as it is. The default is False."""
        return False

    @abstractmethod
    def attend_selected(
        self, asked: SelectingCall, rules: Any, parameters: dict[str, Tensor | None]
    ) -> Result:
        """Return o_selected and its weights.

        Args:
            asked: The call.
            rules: Of its heads.
            parameters: Of the layer, by name, with their current values.
        """

    def change(self, plan: Plan) -> Plan:
        """See `MechanismLayer.change`."""
        # Read parameters here: offloading removes them when this call returns, and the plan runs
        # later.
        parameters = {name: getattr(self, name) for name in self.learned}
        return plan.change(attend=partial(self.attend_blended, plan.call, plan.attend, parameters))

    def attend_blended(
        self,
        call: HostCall,
        whole: Callable,
        parameters: dict[str, Tensor | None],
        score: PairScore,
        value: Tensor,
        options: Options,
        backend: str = "auto",
        weights: bool = False,
    ) -> Result:
        """Return o_selected, blended with full attention if there is a gate.

        Args:
            call: Of the attention layer.
            whole: The attention that the plan had before.
            parameters: Of the layer, by name.
            score, value, options, backend, weights: As in `engines.attention`.
        """
        name = self.config.mechanism
        self.warn_beyond(call, self.config.tuned_length, self.settings, self.advice)
        if call.first.index is None:
            raise ValueError(
                f"{name} was called with a sliding window and keys that begin at an unknown token; allowed: a mask "
                "that Transformers makes (a 2D attention_mask or none), or use_cache=False"
            )
        rules = self.get_rules(call)
        # Full attention does not count keys, so it may read a pruned cache.
        if not self.selects_everything(rules):
            refuse_pruned(call, name)
            if not call.is_causal:
                self.check_later_tokens(call, rules)
        cache = find_layer_cache(call.key, call.value, name, self.kept_kind)
        asked = SelectingCall(
            call=call,
            whole=whole,
            score=score,
            value=value,
            options=options,
            backend=backend,
            weights=weights,
            cache=cache,
        )
        out, selected_weights = self.attend_selected(asked, rules, parameters)
        gate = self.weigh_heads(parameters["gate"], call, rules)
        if gate is None:
            return out, selected_weights
        whole_out, whole_weights = asked.attend_whole()
        # In the dtype of the output: a float32 gate would turn a half-precision blend into float32.
        gate = gate.to(out.dtype)[:, None, None]
        out = whole_out + gate * (out - whole_out)
        if selected_weights is None or whole_weights is None:
            return out, selected_weights
        return out, whole_weights + gate * (selected_weights - whole_weights)

    def get_rules(self, call: HostCall) -> Any:
        """Return the rules of the heads of the call; they are found once."""
        rank, count = call.heads, call.query.shape[1]
        first, total = (0, count) if rank is None else (rank.first, rank.total)
        about = first, count, total, call.is_causal
        # The compiler guards the dict, and would compile again once it is filled.
        if torch.compiler.is_compiling():
            return self.find_rules(*about)
        if about not in self.found:
            self.found[about] = self.find_rules(*about)
        return self.found[about]

    def check_later_tokens(self, call: HostCall, rules: Any) -> None:
        """Check a call whose queries see the tokens after them.

        Raises:
            ValueError: It is unknown which keys belong to the queries.
        """
        call.first_query(self.config.mechanism, self.host)

    def weigh_heads(self, gate: Tensor | None, call: HostCall, rules: Any) -> Tensor | None:
        """Return g of each head, [H]; None for o_selected without a blend.

        Args:
            gate: [H]; None without one.
            call: Of the attention layer.
            rules: Of its heads.
        """
        heads = self.head_mask(call)
        return gate if gate is None or heads is None else gate * heads

    def identical(self) -> bool:
        """See `MechanismLayer.identical`: a gate of 0 leaves full attention."""
        return self.gate is not None and not bool(self.gate.any())
