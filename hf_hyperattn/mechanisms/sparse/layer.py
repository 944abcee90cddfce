"""`SparseLayer`: sparse rules inside an attention layer of a model.

Read here which way a call takes: the compiled kernel, a mask, or the kept keys of a cache that
evicts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import attention, dot_score
from ...utils.attached import attached_to
from ..base import Host, HostCall
from ..selection.cache import LayerCache, QueriesKept
from ..selection.places import read_mask
from ..selection.recent import RecentQueries, find_recent_queries
from ..selection_layer import Result, SelectingCall, SelectionLayer
from . import compiled, operator
from .config import SparseConfig
from .evicted import check_reach, find_query_heads, make_part_call
from .head_rules import HeadRules
from .masking import Text, check_one_text, mask_by_rules, read_text
from .rules import Exact


class SparseLayer(SelectionLayer):
    """The layer of sparse rules. It learns nothing but the gate.

    Raises:
        ValueError: The layer is of a prefix LM, it is not causal and a rule needs causal attention,
            or the number of rules fits another number of heads.
    """

    settings = "sparse rules"
    advice = "choose rules for this length too"
    kept_kind = tuple

    def __init__(self, config: SparseConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        if host is None:
            self.asker = ""
            self.mixes_queries = True
            return
        if host.grows:
            raise ValueError(
                f"sparse was given {host.name} of a prefix LM, where a prompt sees the tokens after it and an answer "
                "does not, which sparse rules do not know; allowed: causal layers and encoder layers, chosen by "
                "layers="
            )
        # State on a cache is stored under the layer's name, since several layers may share one
        # layer of the cache.
        self.asker = host.name
        rules = config.head_rules(host.heads, host.name)
        if not host.is_causal:
            rules.check_both_sides(host.name)
        self.mixes_queries = rules.earlier > 0
        self.reads_cache = host.is_causal and rules.earlier > 0
        self.counts_keys = host.is_causal and not rules.are_exact

    def find_rules(self, first: int, count: int, total: int, is_causal: bool) -> HeadRules:
        """See `SelectionLayer.find_rules`."""
        by_length = []
        for length, rules in self.config.head_rules(total, "this call").by_length:
            # Heads that were not chosen attend to everything.
            of_heads = tuple(
                rules[h] if self.heads is None or h in self.heads else Exact()
                for h in range(first, first + count)
            )
            by_length.append((length, of_heads))
        return HeadRules(tuple(by_length))

    def selects_everything(self, rules: HeadRules) -> bool:
        """See `SelectionLayer.selects_everything`."""
        return rules.are_exact

    def check_later_tokens(self, call: HostCall, rules: HeadRules) -> None:
        """See `SelectionLayer.check_later_tokens`; also checks the rules.

        `__init__` cannot check every call: an attention layer may be called otherwise than it was
        built, and rules by name have no layer.
        """
        rules.check_both_sides(self.asker or "this call")
        super().check_later_tokens(call, rules)

    def attend_selected(
        self, asked: SelectingCall, rules: HeadRules, parameters: dict[str, Tensor | None]
    ) -> Result:
        """See `SelectionLayer.attend_selected`."""
        window = asked.options.window or asked.call.keywords.get("sliding_window")
        # First, because even exact heads need the kept keys: the keys of the call are NaN.
        if asked.cache is not None and asked.cache.keep is not None:
            return self.attend_parts(asked, asked.cache, rules, window)
        if rules.are_exact:
            return asked.attend_whole()
        return self.attend_by_rules(asked, rules, window)

    def attend_by_rules(self, asked: SelectingCall, rules: HeadRules, window: int | None) -> Result:
        """Compute attention on the compiled kernel if possible, else under a mask.

        A call that is being compiled becomes one operator, which decides when it runs.

        Args:
            asked: The call.
            rules: Of its heads.
            window: Sliding window of the attention layer; None: none.
        """
        call = asked.call
        if torch.compiler.is_compiling() and operator.takes_call(asked, rules):
            heads = call.query.shape[1]
            first, total = (
                (0, heads) if call.heads is None else (call.heads.first, call.heads.total)
            )
            return operator.attend(asked, self.write_rules(first, heads, total), window), None
        score, value = asked.score, asked.value
        options = asked.options
        reading = read_mask(call.query, call.key, options, call.is_causal, call.first)
        text = read_text(call.query, call.key, reading, rules, self.find_earlier_queries(call))
        if rules.depend_on_calls:
            self.warn_of_cut(call, text)
        # The kernel returns no weights, and cannot run what other mechanisms put in place of
        # `attention`.
        if asked.whole is attention and not asked.weights:
            out = compiled.attend_by_kernel(
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
        # An indexer (`indices`) may hide any key, so its mask does not show where texts begin.
        if call.keywords.get("indices") is None:
            check_one_text(reading, rules, window)
        masked = mask_by_rules(call.query, call.key, call.scale, options, rules, text, window)
        return asked.whole(score, value, masked, backend=asked.backend, weights=asked.weights)

    def warn_of_cut(self, call: HostCall, text: Text) -> None:
        """Warn once if several tokens follow earlier calls, and a rule selects by whole chunks.

        A chunk that lies in two calls then selects by a part of its queries.
        """
        n = call.query.shape[2]
        if n > 1 and text.last is not None and text.last > n:
            self._warn_once(
                "a sparse rule with query='chunk' selects by the queries of one call, and a text came in several "
                "calls (chunked prefill, assisted decoding, a longer conversation), so that results differ from "
                "those of the whole text; query='own', 'first' or 'previous' does not depend on calls",
                "cut",
            )

    # A constant result: the compiler cannot trace how rules become text.
    @torch.compiler.assume_constant_result
    def write_rules(self, first: int, count: int, total: int) -> str:
        """Return the rules of some heads in causal attention, as `operator.attend` takes them."""
        return operator.write_rules(self.find_rules(first, count, total, True))

    def find_earlier_queries(self, call: HostCall) -> RecentQueries | QueriesKept | None:
        """Return the layer's queries of earlier calls.

        None if no rule reads any, or if nothing keeps them.
        """
        if not (self.reads_cache and call.is_causal):
            return None
        cache = attached_to(call.key, LayerCache)
        if cache is None:
            return find_recent_queries(call.cache, self.asker)
        return cache.get_kept(("queries", self.asker), QueriesKept)

    def attend_parts(
        self, asked: SelectingCall, cache: LayerCache, rules: HeadRules, window: int | None
    ) -> Result:
        """Compute attention over a cache that evicts, part by part.

        The heads of a part keep the same keys.

        Args:
            asked, rules, window: As in `attend_by_rules`.
            cache: Holds the kept keys.
        """
        call = asked.call
        real = check_reach(cache, call, rules, window)
        batch, heads, n, _ = call.query.shape
        # Every head is in one part, so all of the output is written.
        out = call.query.new_empty(batch, heads, n, call.value.shape[3])
        weights = None
        if asked.weights:
            # Weights of evicted keys stay 0.
            weights = call.query.new_zeros(batch, heads, n, call.key.shape[2])
        for part in cache.parts:
            part_call = make_part_call(cache, part, call, asked.options, real)
            part_heads = find_query_heads(cache, part, heads)
            part_asked = SelectingCall(
                call=part_call,
                whole=attention,
                score=dot_score(part_call.query, part_call.key, part_call.scale),
                value=part_call.value,
                options=part_call.options,
                backend=asked.backend,
                weights=asked.weights,
            )
            part_rules = rules.select_rules(part_heads).shorten_lengths(part.tokens[0].gone)
            part_out, part_weights = self.attend_by_rules(part_asked, part_rules, window)
            out[:, part_heads] = part_out.to(out.dtype)
            if weights is not None and part_weights is not None:
                row = torch.tensor(part_heads, device=out.device)[:, None]
                column = part.tokens[0].find_places()
                # Indexing by two tensors puts their axes first: [heads, keys, B, N].
                weights[:, row, :, column] = part_weights.to(weights.dtype).permute(1, 3, 0, 2)
        # Only now: this call may still read keys that later calls will not.
        cache.evict_unreachable(real)
        return out, weights
