"""Sparse attention inside a host: the host's attention, whose queries see the keys that their heads' rules select."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attached import attached_to
from ...engines import attention, dot_score
from ..base import Host, HostCall
from ..selection.cache import LayerCache, QueriesKept
from ..selection.places import read_mask
from ..selection.recent import RecentQueries, recent_queries
from ..selection_layer import Result, SelectingCall, SelectionLayer
from . import compiled
from .config import SparseConfig
from .evicted import call_of_part, check_reach, query_heads_of
from .head_rules import HeadRules
from .masking import check_one_text, masked, text_of
from .rules import Exact


class SparseLayer(SelectionLayer):
    """The layer of sparse rules. Nothing is learned but the gate.

    Raises:
        ValueError: a host of a prefix LM, rules that need causal attention in a host that is not, or rules for another
            count of heads.
    """

    settings = "sparse rules"
    advice = "choose rules for this length too"
    kept_kind = tuple

    def __init__(self, config: SparseConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        if host is None:
            self.asker = ""
            return
        if host.grows:
            raise ValueError(
                f"sparse was given {host.name} of a prefix LM, where a prompt sees the tokens after it and an answer "
                "does not, which sparse rules do not know; allowed: causal layers and encoder layers, chosen by "
                "layers="
            )
        self.asker = host.name
        rules = config.head_rules(host.heads, host.name)
        if not host.is_causal:
            rules.check_both_sides(host.name)
        self.reads_cache = host.is_causal and rules.earlier > 0
        self.counts_keys = host.is_causal and not rules.are_exact

    def find_rules(self, first: int, count: int, total: int, is_causal: bool) -> HeadRules:
        """See `SelectionLayer.find_rules`."""
        chosen = lambda h, rule: rule if self.heads is None or h in self.heads else Exact()
        by_length = self.config.head_rules(total, "this call").by_length
        heads = range(first, first + count)
        return HeadRules(
            tuple(
                (length, tuple(chosen(h, rules[h]) for h in heads)) for length, rules in by_length
            )
        )

    def selects_everything(self, rules: HeadRules) -> bool:
        """See `SelectionLayer.selects_everything`."""
        return rules.are_exact

    def check_later_tokens(self, call: HostCall, rules: HeadRules) -> None:
        """See `SelectionLayer.check_later_tokens`; refuses rules too that have no meaning there.

        A host may be called otherwise than it was built, and rules by name have no host.
        """
        rules.check_both_sides(self.asker or "this call")
        super().check_later_tokens(call, rules)

    def attend_selected(
        self, asked: SelectingCall, rules: HeadRules, parameters: dict[str, Tensor | None]
    ) -> Result:
        """See `SelectionLayer.attend_selected`."""
        window = asked.options.window or asked.call.keywords.get("sliding_window")
        if asked.cache is not None and asked.cache.keep is not None:
            return self.attend_parts(asked, asked.cache, rules, window)
        if rules.are_exact:
            return asked.attend_whole()
        return self.attend_by_rules(asked, rules, window)

    def attend_by_rules(self, asked: SelectingCall, rules: HeadRules, window: int | None) -> Result:
        """By the compiled kernel where it computes this call, else by a mask.

        Args:
            asked: the call.
            rules: of its heads.
            window: the host's sliding window.
        """
        call, score, value, options = asked.call, asked.score, asked.value, asked.options
        reading = read_mask(call.query, call.key, options, call.is_causal, call.first)
        text = text_of(call.query, call.key, reading, rules, self.queries_kept(call))
        if asked.whole is attention and not asked.weights:
            out = compiled.attend(
                call.query,
                call.key,
                score,
                value,
                options,
                rules,
                text,
                window,
                asked.backend,
                self.asker,
            )
            if out is not None:
                return out, None
        if call.keywords.get("indices") is None:  # an indexer hides what it likes
            check_one_text(reading, rules, window)
        hidden = masked(call.query, call.key, call.scale, options, rules, text, window)
        return asked.whole(score, value, hidden, backend=asked.backend, weights=asked.weights)

    def queries_kept(self, call: HostCall) -> RecentQueries | QueriesKept | None:
        """Return the layer's queries of earlier calls; None if no rule reads any, or nothing keeps them."""
        if not (self.reads_cache and call.is_causal):
            return None
        cache = attached_to(call.key, LayerCache)
        if cache is None:
            return recent_queries(call.cache, self.asker)
        return cache.kept(("queries", self.asker), QueriesKept)

    def attend_parts(
        self, asked: SelectingCall, cache: LayerCache, rules: HeadRules, window: int | None
    ) -> Result:
        """With a cache that forgets: heads that keep the same keys together, of these keys."""
        call = asked.call
        real, (batch, heads, n, _) = check_reach(cache, call, rules, window), call.query.shape
        out = call.query.new_empty(batch, heads, n, call.value.shape[3])
        shown = call.query.new_zeros(batch, heads, n, call.key.shape[2]) if asked.weights else None
        for part in cache.parts:
            own = call_of_part(cache, part, call, asked.options, real)
            chosen, gone = query_heads_of(cache, part, heads), part.tokens[0].gone
            score = dot_score(own.query, own.key, own.scale)
            of_part = SelectingCall(
                own, attention, score, own.value, own.options, asked.backend, asked.weights
            )
            found, shares = self.attend_by_rules(
                of_part, rules.of_heads(chosen).after_tokens(gone), window
            )
            out[:, chosen] = found.to(out.dtype)
            if shown is not None and shares is not None:
                at = torch.tensor(chosen, device=out.device)[:, None], part.tokens[0].places()
                shown[:, at[0], :, at[1]] = shares.to(shown.dtype).permute(1, 3, 0, 2)
        cache.evict_unreachable(real)
        return out, shown
