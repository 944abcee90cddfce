"""Sparse attention inside a host: the host's attention, whose queries see the keys that their heads' rules select."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...attached import attached_to
from ...engines import Options, PairScore, attention, dot_score
from ..base import Host, HostCall, MechanismLayer, Plan
from ..pruned import refuse_pruned
from ..selection.cache import LayerCache, QueriesKept, layer_cache_of
from ..selection.places import read_mask
from ..selection.recent import RecentQueries, recent_queries
from . import compiled
from .config import SparseConfig
from .evicted import call_of_part, check_reach, query_heads_of
from .masking import ByLength, all_exact, check_both_sides, check_one_text, masked, rules_in, text_of
from .rules import Exact


class SparseLayer(MechanismLayer):
    """Blend: (1-g)·o + g·o_sparse with g = 0 at first, which computes both. Replace: o_sparse, with nothing to learn.

    Raises:
        ValueError: a host of a prefix LM, rules that need causal attention in a host that is not, or rules for another
            count of heads.
    """

    honours_heads = True
    mixes_heads = False
    reads_forgotten = True

    def __init__(self, config: SparseConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        if host is not None and host.grows:
            raise ValueError(
                f"sparse was given {host.name} of a prefix LM, where a prompt sees the tokens after it and an answer "
                "does not, which sparse rules do not know; allowed: causal layers and encoder layers, chosen by "
                "layers="
            )
        self.host = host
        self.gate = self.per_head(host) if mode == "blend" else None
        self.asker = "" if host is None else host.name
        self.found: dict[tuple, ByLength] = {}
        if host is not None:
            rules = config.by_length(host.heads, host.name)
            if not host.is_causal:
                check_both_sides(rules, host.name)
            self.reads_cache = host.is_causal and any(rule.earlier for rule in rules_in(rules))
            self.counts_keys = host.is_causal and not all_exact(rules)

    def change(self, plan: Plan) -> Plan:
        # Read here: offload takes parameters away when this call returns, and the plan runs later.
        return plan.change(attend=partial(self.attend, plan.call, plan.attend, self.gate))

    def attend(
        self, call: HostCall, whole, gate: Tensor | None, score: PairScore, value: Tensor, options: Options,
        backend="auto", weights=False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The sparse attention, beside the whole one where both are wanted.

        Args:
            whole: attends to everything.
            gate: as it stands.
            score, value, options, backend, weights: as in `engines.attention`.
        """
        self.warn_beyond(
            call,
            self.config.tuned_length,
            "sparse rules",
            "choose rules for this length too",
        )
        if call.first.index is None:
            raise ValueError(
                "sparse was called with a sliding window and keys of which nobody says where they begin; allowed: a "
                "mask that Transformers makes (a 2D attention_mask or none), or use_cache=False"
            )
        window = options.window or call.keywords.get("sliding_window")
        rules, kept = self.rules(call), layer_cache_of(call.key, call.value, "sparse", tuple)
        if not all_exact(rules):
            refuse_pruned(call, "sparse")
            if not call.is_causal:
                self.check_later_tokens(call, rules)
        if kept is not None and kept.keep is not None:
            return self.of_parts(kept, call, rules, window, options, backend, weights)
        if all_exact(rules):
            out, shares = whole(score, value, options, backend=backend, weights=weights)
        else:
            out, shares = self.sparse(call, whole, rules, window, score, value, options, backend, weights)
        if gate is None:
            return out, shares
        first, shown = whole(score, value, options, backend=backend, weights=weights)
        heads = self.head_mask(call)
        gate = (gate if heads is None else gate * heads).to(out.dtype)[:, None, None]
        return first + gate * (out - first), shares if shown is None else shown + gate * (shares - shown)

    def sparse(
        self, call: HostCall, whole, rules: ByLength, window: int | None, score: PairScore, value: Tensor,
        options: Options, backend: str, weights: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """By the compiled kernel where it computes this call, else by a mask."""
        reading = read_mask(call.query, call.key, options, call.is_causal, call.first)
        reads_cache = self.reads_cache and call.is_causal
        cache: LayerCache | None = attached_to(call.key, LayerCache) if reads_cache else None
        recent: RecentQueries | QueriesKept | None
        if cache is None:
            recent = recent_queries(call.cache if reads_cache else None, self.asker)
        else:
            recent = cache.kept(("queries", self.asker), QueriesKept)
        text = text_of(call.query, call.key, reading, rules, recent)
        if whole is attention and not weights:
            out = compiled.attend(
                call.query, call.key, score, value, options, rules, text, window, backend, self.asker
            )
            if out is not None:
                return out, None
        if call.keywords.get("indices") is None:  # an indexer hides what it likes
            check_one_text(reading, rules, window)
        hidden = masked(call.query, call.key, call.scale, options, rules, text, window)
        return whole(score, value, hidden, backend=backend, weights=weights)

    def check_later_tokens(self, call: HostCall, rules: ByLength) -> None:
        """Refuse a call whose queries see the tokens after them, if rules or keys have no meaning there.

        A host may be called otherwise than it was built, and rules by name have no host.
        """
        check_both_sides(rules, self.asker or "this call")
        call.first_query("sparse", self.host)

    def of_parts(
        self, cache: LayerCache, call: HostCall, rules: ByLength, window: int | None, options: Options, backend: str,
        weights: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """With a cache that forgets: heads that keep the same keys together, of these keys."""
        real, (batch, heads, n, _) = check_reach(cache, call, rules, window), call.query.shape
        out = call.query.new_empty(batch, heads, n, call.value.shape[3])
        shown = call.query.new_zeros(batch, heads, n, call.key.shape[2]) if weights else None
        for part in cache.parts:
            own = call_of_part(cache, part, call, options, real)
            chosen, gone = query_heads_of(cache, part, heads), part.tokens[0].gone
            of_part = tuple(  # what is left of a text begins `gone` tokens later
                (None if length is None else length - gone, tuple(each[h] for h in chosen)) for length, each in rules
            )
            score = dot_score(own.query, own.key, own.scale)
            found, shares = self.sparse(
                own, attention, of_part, window, score, own.value, own.options, backend, weights
            )
            out[:, chosen] = found.to(out.dtype)
            if shown is not None and shares is not None:
                at = torch.tensor(chosen, device=out.device)[:, None], part.tokens[0].places()
                shown[:, at[0], :, at[1]] = shares.to(shown.dtype).permute(1, 3, 0, 2)
        cache.evict_unreachable(real)
        return out, shown

    def rules(self, call: HostCall) -> ByLength:
        """The rules of the heads that are in the call; those that were not chosen are exact."""
        rank, heads = call.heads, call.query.shape[1]
        first, total = (0, heads) if rank is None else (rank.first, rank.total)
        return self.of_heads(range(first, first + heads), total)

    def of_heads(self, heads: range, total: int) -> ByLength:
        """The rules of these heads, out of `total`; found once."""
        if torch.compiler.is_compiling():  # which would compile again once they are found
            return self._find_rules(heads, total)
        about = heads, total, self.heads
        if about not in self.found:
            self.found[about] = self._find_rules(heads, total)
        return self.found[about]

    def _find_rules(self, heads: range, total: int) -> ByLength:
        chosen = lambda h, rule: rule if self.heads is None or h in self.heads else Exact()
        return tuple(
            (length, tuple(chosen(h, rules[h]) for h in heads))
            for length, rules in self.config.by_length(total, "this call")
        )

    def identical(self) -> bool:
        return self.gate is not None and not bool(self.gate.any())
