"""Trilinear attention inside a host: three-way, with a second key and value made from the first, or BiDAF's score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...engines import DOT, Options, PairScore, ScoreTerm, working_dtype
from ...engines.sdpa import sum_biases
from ...fields import refuse
from ..base import Host, HostCall, MechanismLayer, Plan
from ..checks import check_host
from ..pruned import refuse_pruned
from .attention import attend
from .config import TrilinearConfig
from .joined import RealTokens, find_real_tokens, join_tokens
from .reference import Windows, bidaf_scores


def trilinear_layer(
    config: TrilinearConfig, host: Host | None, mode: str = "replace", heads=None
) -> MechanismLayer:
    """The layer of the form that the config asks for; arguments as in `MechanismLayer`."""
    kind = BidafLayer if config.form == "bidaf" else SimplicialLayer
    return kind(config, host, mode, heads)


class BidafLayer(MechanismLayer):
    """S_ij = w_1·q_i + w_2·k_j + w_3·(q_i ∘ k_j), which starts as the host's own score, in either mode.

    It is one dot product, (w_3 ∘ q_i + w_2)·k_j, with w_1·q_i added to the whole row. What is added to a row is not
    seen by softmax, so that w_1 matters, and learns, only in hosts with sinks or a softcap.

    Parameters, [heads, d], zero at first: `w1`, `w2`, and `w3`: w_3 = scale · (1 + w3).

    Raises:
        ValueError: nothing tells the head dimension of the host.
    """

    honours_heads = True
    mixes_heads = False

    def __init__(
        self, config: TrilinearConfig, host: Host | None, mode: str = "replace", heads=None
    ):
        super().__init__(config, host, mode, heads)
        known = check_host("trilinear", host, "head_dim")
        self.w1, self.w2, self.w3 = (
            nn.Parameter(torch.zeros(known.heads, known.head_dim)) for _ in range(3)
        )

    def change(self, plan: Plan) -> Plan:
        call, mask = plan.call, self.head_mask(plan.call)
        dtype = working_dtype(call.query, call.key)
        w1, w2, w3 = (
            (w if mask is None else w * mask[:, None]).to(dtype)
            for w in (self.w1, self.w2, self.w3)
        )
        with_row = plan.options.sinks is not None or plan.options.softcap is not None
        return plan.change(
            score=bidaf_score(call.query, call.key, w1, w2, call.scale * (1 + w3), with_row)
        )

    def identical(self) -> bool:
        return not any(bool(p.any()) for p in self.parameters())


def bidaf_score(
    query: Tensor, key: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, with_row: bool
) -> PairScore:
    """The score as engines see it.

    Args:
        query: [B, H, N, d], key: [B, Hkv, M, d], as they come.
        w1, w2, w3: [H, d], in the dtype to compute in.
        with_row: keep what is added to a whole row, as one more feature.
    """
    q, k = query.to(w1.dtype), key.to(w1.dtype)
    left = q * w3[:, None] + w2[:, None]
    if not with_row:
        unused = 0.0 * w1.sum()  # a gradient of zero, not of rounding errors
        term = ScoreTerm(DOT, lambda: bidaf_scores(q, k, w1.detach(), w2, w3) + unused)
        return PairScore(left + unused, k, (term,))
    row = torch.einsum("hd,bhnd->bhn", w1, q)[..., None]
    # the gate of ones says that the features are not the host's own keys
    term = ScoreTerm(DOT, partial(bidaf_scores, q, k, w1, w2, w3), gate=w1.new_ones(query.shape[1]))
    return PairScore(
        torch.cat([left, row], -1), torch.cat([k, k.new_ones(*k.shape[:-1], 1)], -1), (term,)
    )


class SimplicialLayer(MechanismLayer):
    """Three-way attention with k2 = 1 + W k and v2 = 1 + U v, which W = U = 0 makes the host's own.

    A query that sees keys beyond the window of j would lose them. With mode="blend" its output is therefore
    (1-g)·o + g·o_simplicial, g = 0 at first, while queries that the window cuts nothing from have no gate. A tensor of
    a rank below the head dimension is no identity either, and all queries have the gate. mode="replace" has none.

    Parameters, zero at first: `key_map` W [kv heads, d, d], `value_map` U [kv heads, dv, dv]; `gate` g [heads]; with
    tensor="distmult" `diagonal` [heads, d], what T's diagonal is more than 1; with tensor="cp" `query_factor`
    [heads, R, d], `key_factor` and `key2_factor` [kv heads, R, d], what the three maps are more than the first R rows
    of the unit matrix.

    Raises:
        ValueError: unknown head dimensions, a rank above them, or windows in cross-attention.
    """

    honours_heads = True
    mixes_heads = False

    def __init__(
        self, config: TrilinearConfig, host: Host | None, mode: str = "replace", heads=None
    ):
        super().__init__(config, host, mode, heads)
        known = check_host("trilinear", host, "head_dim", "value_dim")
        if config.rank is not None and config.rank > known.head_dim:
            allowed = f"1 to {known.head_dim}, the head dimension of {known.name}"
            refuse("TrilinearConfig.rank", config.rank, allowed)
        if known.is_cross and config.windows is not None:
            raise ValueError(
                f"TrilinearConfig.windows={config.windows} has no meaning for cross-attention ({known.name}); allowed: "
                "windows=None, or include_cross_attention=False"
            )
        self.known, self.host, groups = known, known.name, known.kv_heads
        self.width = width = known.head_dim
        self.rank: int = config.rank or width
        w1, w2 = config.windows or (None, None)
        self.counts_keys = config.windows is not None
        self.windows = Windows(w1, w2)
        gated = mode == "blend" and (self.windows.first is not None or self.rank < width)
        self.gate = self.per_head(host) if gated else None
        self.key_map = nn.Parameter(torch.zeros(groups, width, width))
        self.value_map = nn.Parameter(torch.zeros(groups, known.value_dim, known.value_dim))
        if config.tensor == "distmult":
            self.diagonal = nn.Parameter(torch.zeros(known.heads, width))
        if config.tensor == "cp":
            self.query_factor = nn.Parameter(torch.zeros(known.heads, self.rank, width))
            self.key_factor = nn.Parameter(torch.zeros(groups, self.rank, width))
            self.key2_factor = nn.Parameter(torch.zeros(groups, self.rank, width))

    def change(self, plan: Plan) -> Plan:
        # now: under offload the parameters are here only while the layer is called
        parameters = dict(self.named_parameters())
        return plan.change(attend=partial(self.attend, plan.call, plan.attend, parameters))

    def attend(
        self,
        call: HostCall,
        original: Callable,
        parameters: Mapping[str, Tensor],
        score: PairScore,
        value: Tensor,
        options: Options,
        backend="auto",
        weights=False,
    ) -> tuple[Tensor, Tensor | None]:
        """Three-way attention, beside the host's own where both count.

        Args:
            original: computes the host's own.
            parameters: of the layer, by name.
            score, value, options, backend, weights: as in `engines.attention`.
        """
        simplicial_options = with_bias(score, options)
        start: int | Tensor = options.offset
        joined = None
        if self.config.windows:
            refuse_pruned(call, "trilinear")
            start = call.first_query("trilinear", self.known)
            joined = join_tokens(call, start, self.known.grows)
        value, p = (
            value.to(score.query.dtype),
            {n: t.to(score.query.dtype) for n, t in parameters.items()},
        )
        self.check_shapes(score.key, value, p)
        share = self.share(call, start, p.get("gate"), value.dtype)
        all_query, all_key, all_value = score.query, score.key, value
        if joined is not None:
            start = all_key.shape[2] - all_query.shape[2]
            all_query = joined.move_queries(all_query)
            all_key, all_value = joined.move_keys(all_key), joined.move_keys(all_value)
            simplicial_options = joined.move_options(simplicial_options)
        # a step of decoding maps no keys and values that both windows have passed
        first = 0 if weights or options.dropout_p else self.windows.first_key(start)
        query, keys = self.features(all_query, all_key[:, :, first:], p)
        seen = all_value[:, :, first:]
        outputs = attend(
            query,
            keys,
            (seen, 1 + seen @ p["value_map"].mT),
            from_key(simplicial_options, first, start - first if isinstance(start, int) else 0),
            replace(self.windows, back=call.is_causal),
            offset=None if isinstance(start, int) else start,
            backend=backend,
            weights=weights,
        )
        if joined is not None:
            outputs = joined.restore(*outputs)
        gate = p.get("gate")
        if share is None:
            # the gate has a gradient, zero
            return outputs if gate is None else (outputs[0] + 0.0 * gate.sum(), outputs[1])
        plain = original(score, value, options, backend=backend, weights=weights)
        mixed: Any = (
            None if a is None else a + share * (b - a) for a, b in zip(plain, outputs, strict=True)
        )
        return tuple(mixed)

    def share(
        self, call: HostCall, start: int | Tensor, gate: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """How much of three-way attention every output has, [B|1, H, N, 1]; None for all of it."""
        mask, w1, gated = self.head_mask(call), self.windows.first, None
        if gate is not None and self.rank < self.width:
            gated = torch.ones((), dtype=torch.bool, device=call.query.device)
        elif gate is not None and w1 is not None and call.key.shape[2] > w1:
            gated = cut_rows(call, start, w1, self.known.grows)
        if gated is None and mask is None:
            return None
        share = torch.ones((), dtype=dtype, device=call.query.device)
        if gated is not None and gate is not None:
            share = torch.where(gated, gate[:, None], share)
        if mask is not None:
            share = share * mask.to(dtype)[:, None]
        return share[..., None]

    def features(
        self, query: Tensor, key: Tensor, p: dict[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """q, k and k2 after the tensor's maps."""
        key2 = 1 + key @ p["key_map"].mT
        if self.config.tensor == "distmult":
            return query * (1 + p["diagonal"])[:, None], (key, key2)
        if self.config.tensor == "cp":
            parts = (("query", query), ("key", key), ("key2", key2))
            # the first R rows of the unit matrix, plus what was learned, times x
            query, key, key2 = (x[..., : self.rank] + x @ p[f"{n}_factor"].mT for n, x in parts)
        return query, (key, key2)

    def check_shapes(self, key: Tensor, value: Tensor, p: dict[str, Tensor]) -> None:
        """Raise where keys or values are not of the shape that the host was patched for."""
        shapes = (key.shape[1], key.shape[-1], value.shape[-1])
        built = (len(p["key_map"]), self.width, p["value_map"].shape[-1])
        if shapes != built:
            raise ValueError(
                f"trilinear was built for {built[0]} key heads of {built[1]} and values of {built[2]} numbers in "
                f"{self.host}, and its attention is called with {shapes[0]}, {shapes[1]} and {shapes[2]}; allowed: "
                "hosts whose config says what they hand over, choose them with layers=..."
            )

    def identical(self) -> bool:
        if self.rank < self.width:
            return self.gate is not None and not bool(self.gate.any())
        exact = self.gate is not None or self.windows.first is None
        return exact and not any(bool(p.any()) for p in self.parameters())


def cut_rows(call: HostCall, start: int | Tensor, window: int, grows: bool = False) -> Tensor:
    """Queries that would lose keys to the window of j, bool [B|1, H|1, N].

    Args:
        start: the key that is the first query's own.
        window: w1.
        grows: Of the layer, see `Host`.
    """
    n, m, options = call.query.shape[2], call.key.shape[2], call.options
    i = torch.arange(n, device=call.query.device) + start
    if options.mask is not None:
        low, high, seen = call.read_mask(grows).ends
        tokens = find_real_tokens(call, grows)
        if tokens is not None:  # windows count tokens, no padding
            i, low, high = count_tokens(tokens, low, high)
    else:
        low, high, seen = (
            torch.zeros_like(i),
            torch.full_like(i, m - 1),
            torch.ones_like(i, dtype=torch.bool),
        )
        if options.is_causal:
            high = i
        if options.window is not None:
            low = (i - options.window + 1).clamp_min(0)
            high = torch.minimum(high, i + options.window - 1)
    ahead = 0 if call.is_causal else window - 1
    cut = ((low <= i - window) | (high > i + ahead)) & seen
    return cut if cut.dim() == 3 else cut[None, None]


def count_tokens(tokens: RealTokens, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of the tokens of the queries, [B|1, 1, N], and of keys, [B|1, H|1, N|1], without padding.

    Args:
        tokens: Which are real.
        low, high: int64 [B|1, H|1, N|1], keys.
    """
    count = tokens.keys.cumsum(1)
    of_queries = tokens.of_queries(count)[:, None]
    batch = max(count.shape[0], low.shape[0])
    count, low, high = (tensor.expand(batch, *tensor.shape[1:]) for tensor in (count, low, high))
    of_low, of_high = (count.gather(1, keys.flatten(1)).view(keys.shape) for keys in (low, high))
    return of_queries, of_low, of_high


def from_key(options: Options, first: int, offset: int) -> Options:
    """Options for the keys from `first` on, of which `offset` is the first query's own."""
    mask, bias = (
        t if t is None or t.shape[-1] == 1 else t[..., first:] for t in (options.mask, options.bias)
    )
    return replace(options, mask=mask, bias=bias, offset=offset)


def with_bias(score: PairScore, options: Options) -> Options:
    """Options whose bias holds all that is added to the dot product.

    Raises:
        ValueError: the score is not the dot product with something added.
    """
    first, *rest = score.terms
    if first.term is not DOT or first.gate is not None:
        raise ValueError(
            f"trilinear takes the place of the score, and here that is {score.score_key!r}; allowed: the host's own "
            "dot product, and a bias"
        )
    return replace(options, bias=sum_biases(tuple(rest), None, options.bias)) if rest else options
