"""The base of the layers of HSA and of sparse rules: attention to selected keys, blended with full attention."""

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
from .pruned import refuse_pruned
from .selection.cache import LayerCache, layer_cache_of

#: The output [B, H, N, dv], and the weights [B, H, N, M]; None where they were not asked for.
Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class SelectingCall:
    """A call of a host whose queries attend to what their heads' rules select.

    Args:
        call: Of the host.
        whole: Attends to everything, as the host does.
        score, value, options, backend, weights: As in `engines.attention`.
        cache: Where keys and values come from one that keeps more than these.
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
        """Return the attention to everything."""
        return self.whole(
            self.score, self.value, self.options, backend=self.backend, weights=self.weights
        )


class SelectionLayer(MechanismLayer):
    """Blend: (1-g)·o + g·o_selected with g = 0 at first, which computes both. Replace: o_selected.

    Subclasses say what the heads' rules are (`find_rules`) and compute o_selected (`attend_selected`).
    """

    honours_heads = True
    mixes_heads = False
    reads_forgotten = True

    #: For the warning beyond the length that settings were chosen for: their name, and the advice.
    settings: ClassVar[str]
    advice: ClassVar[str]
    #: The type of `LayerCache.keep` that the layer can read, if a cache may forget something.
    kept_kind: ClassVar[type]
    #: The attributes that hold the layer's parameters, or None.
    learned: ClassVar[tuple[str, ...]] = ("gate",)

    def __init__(
        self, config, host: Host | None, mode: str = "replace", heads: tuple[int, ...] | None = None
    ):
        super().__init__(config, host, mode, heads)
        self.host = host
        # In a prefix LM rows grow as in causal attention, and a mask says what a query sees.
        self.grows = host is not None and host.grows
        self.gate = self.per_head(host) if mode == "blend" else None
        #: What `find_rules` found.
        self.found: dict[tuple, Any] = {}

    @abstractmethod
    def find_rules(self, first: int, count: int, total: int, is_causal: bool) -> Any:
        """Return the rules of the heads first ... first + count - 1 out of `total`.

        Heads that were not chosen (`heads`) have rules that select everything.
        """

    def selects_everything(self, rules: Any) -> bool:
        """Whether these rules leave attention as it is. The default answer is no."""
        return False

    @abstractmethod
    def attend_selected(
        self, asked: SelectingCall, rules: Any, parameters: dict[str, Tensor | None]
    ) -> Result:
        """Return o_selected and its weights.

        Args:
            asked: The call.
            rules: Of its heads.
            parameters: Of the layer, by name, as they stand.
        """

    def change(self, plan: Plan) -> Plan:
        # Read here: offload takes parameters away when this call returns, and the plan runs later.
        parameters = {name: getattr(self, name) for name in self.learned}
        return plan.change(attend=partial(self.attend, plan.call, plan.attend, parameters))

    def attend(
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
        """Return o_selected, blended with full attention if there is a gate."""
        name = self.config.mechanism
        self.warn_beyond(call, self.config.tuned_length, self.settings, self.advice)
        if call.first.index is None:
            raise ValueError(
                f"{name} was called with a sliding window and keys that begin at an unknown token; allowed: a mask "
                "that Transformers makes (a 2D attention_mask or none), or use_cache=False"
            )
        rules = self.rules_of(call)
        if not self.selects_everything(rules):
            refuse_pruned(call, name)
            if not call.is_causal:
                self.check_later_tokens(call, rules)
        cache = layer_cache_of(call.key, call.value, name, self.kept_kind)
        asked = SelectingCall(call, whole, score, value, options, backend, weights, cache)
        out, shares = self.attend_selected(asked, rules, parameters)
        gate = self.weigh_heads(parameters["gate"], call, rules)
        if gate is None:
            return out, shares
        first, shown = asked.attend_whole()
        gate = gate.to(out.dtype)[:, None, None]
        if shares is None or shown is None:
            return first + gate * (out - first), shares
        return first + gate * (out - first), shown + gate * (shares - shown)

    def rules_of(self, call: HostCall) -> Any:
        """Return the rules of the heads that are in the call, found once."""
        rank, count = call.heads, call.query.shape[1]
        first, total = (0, count) if rank is None else (rank.first, rank.total)
        about = first, count, total, call.is_causal
        if torch.compiler.is_compiling():  # which would compile again once they are found
            return self.find_rules(*about)
        if about not in self.found:
            self.found[about] = self.find_rules(*about)
        return self.found[about]

    def check_later_tokens(self, call: HostCall, rules: Any) -> None:
        """Refuse a call whose queries see the tokens after them, if it does not tell which keys are theirs."""
        call.first_query(self.config.mechanism, self.host)

    def weigh_heads(self, gate: Tensor | None, call: HostCall, rules: Any) -> Tensor | None:
        """Return how much of o_selected each head gets, [H]; None for all of it."""
        heads = self.head_mask(call)
        return gate if gate is None or heads is None else gate * heads

    def identical(self) -> bool:
        return self.gate is not None and not bool(self.gate.any())
