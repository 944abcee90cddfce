"""Trilinear attention in an attention layer.

`SimplicialLayer` is three-way attention with a second key and value made from the first;
`BidafLayer` is BiDAF's score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...config.fields import refuse
from ...engines import DOT, Options, PairScore, ScoreTerm, working_dtype
from ...engines.sdpa import sum_biases
from ..base import Host, HostCall, MechanismLayer, Plan
from ..call_cache import refuse_pruned
from ..checks import check_host
from .attention import attend
from .config import TrilinearConfig
from .joined import RealTokens, find_real_tokens, join_tokens
from .reference import Windows, bidaf_scores


def trilinear_layer(
    config: TrilinearConfig, host: Host | None, mode: str = "replace", heads=None
) -> MechanismLayer:
    """Return the layer for the config's form; arguments as in `MechanismLayer`."""
    kind = BidafLayer if config.form == "bidaf" else SimplicialLayer
    return kind(config, host, mode, heads)


class BidafLayer(MechanismLayer):
    """BiDAF's score, which starts as the original score.

    S_ij = w_1·q_i + w_2·k_j + w_3·(q_i ∘ k_j)

    It is computed as one dot product, (w_3 ∘ q_i + w_2)·k_j, with w_1·q_i added to the whole row. A
    softmax ignores a constant added to a row, so w_1 matters (and learns) only with sinks or a
    softcap.

    Parameters, shape [heads, d], initialised to zero: `w1`, `w2`, and `w3`, where w_3 = scale · (1
    + w3).

    Raises:
        ValueError: The head dimension of the attention layer is unknown.
    """

    honours_heads = True
    mixes_heads = False
    mixes_queries = False

    def __init__(
        self, config: TrilinearConfig, host: Host | None, mode: str = "replace", heads=None
    ):
        super().__init__(config, host, mode, heads)
        known = check_host("trilinear", host, "head_dim")
        self.w1, self.w2, self.w3 = (
            nn.Parameter(torch.zeros(known.heads, known.head_dim)) for _ in range(3)
        )

    def change(self, plan: Plan) -> Plan:
        call = plan.call
        mask = self.head_mask(call)
        dtype = working_dtype(call.query, call.key)
        w1, w2, w3 = (
            (w if mask is None else w * mask[:, None]).to(dtype)
            for w in (self.w1, self.w2, self.w3)
        )
        # Only sinks and the softcap notice a constant that is added to a whole row.
        with_row = plan.options.sinks is not None or plan.options.softcap is not None
        return plan.change(
            score=bidaf_score(call.query, call.key, w1, w2, call.scale * (1 + w3), with_row)
        )

    def identical(self) -> bool:
        return not any(bool(p.any()) for p in self.parameters())


def bidaf_score(
    query: Tensor, key: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, with_row: bool
) -> PairScore:
    """Return the score for the engines.

    Args:
        query: Shape [B, H, N, d], unscaled.
        key: Shape [B, Hkv, M, d].
        w1: Shape [H, d], in the dtype of the computation.
        w2: Shape [H, d].
        w3: Shape [H, d].
        with_row: Whether to keep the row term w_1·q_i, as one more feature.
    """
    q, k = query.to(w1.dtype), key.to(w1.dtype)
    left = q * w3[:, None] + w2[:, None]
    if not with_row:
        # w1 gets a gradient of exactly zero. Through the row term it would get rounding errors.
        unused = 0.0 * w1.sum()
        term = ScoreTerm(DOT, lambda: bidaf_scores(q, k, w1.detach(), w2, w3) + unused)
        return PairScore(left + unused, k, (term,))
    row = torch.einsum("hd,bhnd->bhn", w1, q)[..., None]
    # The gate of ones marks that the features are not the layer's own keys.
    term = ScoreTerm(DOT, partial(bidaf_scores, q, k, w1, w2, w3), gate=w1.new_ones(query.shape[1]))
    left = torch.cat([left, row], -1)
    right = torch.cat([k, k.new_ones(*k.shape[:-1], 1)], -1)
    return PairScore(left, right, (term,))


class SimplicialLayer(MechanismLayer):
    """Three-way attention with k2 = 1 + W k and v2 = 1 + U v.

    W = U = 0 is the original attention for queries that see all their keys. A query with keys
    beyond the window of j would lose them. With mode="blend" its output is therefore (1-g)·o +
    g·o_simplicial, where g starts at 0; queries that lose no key have no gate. A tensor of a rank
    below the head dimension is no identity either, so all queries are gated. mode="replace" has no
    gates.

    Parameters, initialised to zero:

    - `key_map` W [kv heads, d, d] and `value_map` U [kv heads, dv, dv].
    - `gate` g [heads].
    - tensor="distmult": `diagonal` [heads, d], the difference of T's diagonal from 1.
    - tensor="cp": `query_factor` [heads, R, d], `key_factor` and `key2_factor` [kv heads, R, d],
      the differences of the three maps from the first R rows of the identity matrix.

    Raises:
        ValueError: Head dimensions are unknown, the rank exceeds them, or there are windows in
            cross-attention.
    """

    honours_heads = True
    mixes_heads = False
    mixes_queries = False

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
        self.known = known
        self.host = known.name
        self.width = width = known.head_dim
        groups = known.kv_heads
        self.rank: int = config.rank or width
        w1, w2 = config.windows or (None, None)
        self.counts_keys = config.windows is not None
        self.windows = Windows(w1, w2)
        # Without a window of j and at full rank, zero maps are the identity, and no gate is needed.
        gated = mode == "blend" and (self.windows.first is not None or self.rank < width)
        self.gate = self.per_head(host) if gated else None
        self.key_map = nn.Parameter(torch.zeros(groups, width, width))
        self.value_map = nn.Parameter(torch.zeros(groups, known.value_dim, known.value_dim))
        # Differences from the identity, so that zero changes nothing.
        if config.tensor == "distmult":
            self.diagonal = nn.Parameter(torch.zeros(known.heads, width))
        if config.tensor == "cp":
            self.query_factor = nn.Parameter(torch.zeros(known.heads, self.rank, width))
            self.key_factor = nn.Parameter(torch.zeros(groups, self.rank, width))
            self.key2_factor = nn.Parameter(torch.zeros(groups, self.rank, width))

    def change(self, plan: Plan) -> Plan:
        # Collect the parameters now: with offload they are on the device only during the call.
        parameters = dict(self.named_parameters())
        return plan.change(attend=partial(self.attend_layer, plan.call, plan.attend, parameters))

    def attend_layer(
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
        """Compute three-way attention, blended with the original if there is a gate.

        Args:
            call: The attention call.
            original: Computes the original attention.
            parameters: Parameters of the layer by name.
            score: As in `engines.attention`.
            value: As in `engines.attention`.
            options: As in `engines.attention`.
            backend: As in `engines.attention`.
            weights: As in `engines.attention`.
        """
        # Steps: order of tokens, share of three-way attention, features, attention, blend.
        simplicial_options = add_score_bias(score, options)
        start: int | Tensor = options.offset
        joined = None
        # Windows need the position of each query among the keys, which pruned caches have lost.
        if self.config.windows:
            refuse_pruned(call, "trilinear")
            start = call.first_query("trilinear", self.known)
            joined = join_tokens(call, start, self.known.grows)
        value = value.to(score.query.dtype)
        p = {name: t.to(score.query.dtype) for name, t in parameters.items()}
        self.check_shapes(score.key, value, p)
        share = self.compute_share(call, start, p.get("gate"), value.dtype)
        all_query, all_key, all_value = score.query, score.key, value
        if joined is not None:
            start = all_key.shape[2] - all_query.shape[2]
            all_query = joined.move_queries(all_query)
            all_key, all_value = joined.move_keys(all_key), joined.move_keys(all_value)
            simplicial_options = joined.move_options(simplicial_options)
        # A decoding step skips the maps of keys and values that both windows have passed.
        first = 0 if weights or options.dropout_p else self.windows.first_key(start)
        query, keys = self.compute_features(all_query, all_key[:, :, first:], p)
        seen = all_value[:, :, first:]
        outputs = attend(
            query,
            keys,
            (seen, 1 + seen @ p["value_map"].mT),
            cut_options(simplicial_options, first, start - first if isinstance(start, int) else 0),
            replace(self.windows, back=call.is_causal),
            offset=None if isinstance(start, int) else start,
            backend=backend,
            weights=weights,
        )
        if joined is not None:
            outputs = joined.restore(*outputs)
        gate = p.get("gate")
        if share is None:
            # An unused gate gets a gradient of zero: optimizers and DDP expect one.
            return outputs if gate is None else (outputs[0] + 0.0 * gate.sum(), outputs[1])
        plain = original(score, value, options, backend=backend, weights=weights)
        # (1 - share) · plain + share · three-way, for outputs and weights.
        mixed: Any = (
            None if a is None else a + share * (b - a) for a, b in zip(plain, outputs, strict=True)
        )
        return tuple(mixed)

    def compute_share(
        self, call: HostCall, start: int | Tensor, gate: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the share of three-way attention in every output, [B|1, H, N, 1].

        None means that every output is three-way attention only.
        """
        mask = self.head_mask(call)
        w1 = self.windows.first
        gated = None
        if gate is not None and self.rank < self.width:
            gated = torch.ones((), dtype=torch.bool, device=call.query.device)
        # A sequence that fits into the window loses no key.
        elif gate is not None and w1 is not None and call.key.shape[2] > w1:
            gated = find_cut_queries(call, start, w1, self.known.grows)
        if gated is None and mask is None:
            return None
        share = torch.ones((), dtype=dtype, device=call.query.device)
        if gated is not None and gate is not None:
            share = torch.where(gated, gate[:, None], share)
        if mask is not None:
            share = share * mask.to(dtype)[:, None]
        return share[..., None]

    def compute_features(
        self, query: Tensor, key: Tensor, p: dict[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return q, and k with k2, after the maps of the tensor T."""
        key2 = 1 + key @ p["key_map"].mT
        if self.config.tensor == "distmult":
            return query * (1 + p["diagonal"])[:, None], (key, key2)
        if self.config.tensor == "cp":
            parts = (("query", query), ("key", key), ("key2", key2))
            # (first R rows of the identity + learned factor) · x, without forming the identity.
            query, key, key2 = (x[..., : self.rank] + x @ p[f"{n}_factor"].mT for n, x in parts)
        return query, (key, key2)

    def check_shapes(self, key: Tensor, value: Tensor, p: dict[str, Tensor]) -> None:
        """Raise ValueError if keys or values do not have the shapes of the patched layer."""
        # Some families pass keys of another width than their config says.
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
        # Without a gate, a window of j may hide keys of the original attention.
        exact = self.gate is not None or self.windows.first is None
        return exact and not any(bool(p.any()) for p in self.parameters())


def find_cut_queries(
    call: HostCall, start: int | Tensor, window: int, grows: bool = False
) -> Tensor:
    """Return the queries that would lose keys to the window of j, bool [B|1, H|1, N].

    Args:
        call: The attention call.
        start: The key of the first query's own token.
        window: w1.
        grows: Whether the layer is a prefix LM that reads a cache, see `Host`.
    """
    n, m = call.query.shape[2], call.key.shape[2]
    options = call.options
    i = torch.arange(n, device=call.query.device) + start
    if options.mask is not None:
        # First and last visible key of every query, from the mask.
        low, high, seen = call.read_mask(grows).ends
        tokens = find_real_tokens(call, grows)
        # Windows count tokens without padding.
        if tokens is not None:
            i, low, high = count_tokens(tokens, low, high)
    else:
        low = torch.zeros_like(i)
        high = torch.full_like(i, m - 1)
        seen = torch.ones_like(i, dtype=torch.bool)
        if options.is_causal:
            high = i
        if options.window is not None:
            low = (i - options.window + 1).clamp_min(0)
            high = torch.minimum(high, i + options.window - 1)
    # A bidirectional window also looks ahead.
    ahead = 0 if call.is_causal else window - 1
    cut = ((low <= i - window) | (high > i + ahead)) & seen
    return cut if cut.dim() == 3 else cut[None, None]


def count_tokens(tokens: RealTokens, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token numbers of queries and keys, without padding.

    Args:
        tokens: The real tokens.
        low: First visible keys, int64 [B|1, H|1, N|1].
        high: Last visible keys, int64 [B|1, H|1, N|1].

    Returns:
        Numbers of the queries, [B|1, 1, N], and of `low` and `high`.
    """
    count = tokens.keys.cumsum(1)
    of_queries = tokens.of_queries(count)[:, None]
    batch = max(count.shape[0], low.shape[0])
    count, low, high = (tensor.expand(batch, *tensor.shape[1:]) for tensor in (count, low, high))
    of_low, of_high = (count.gather(1, keys.flatten(1)).view(keys.shape) for keys in (low, high))
    return of_queries, of_low, of_high


def cut_options(options: Options, first: int, offset: int) -> Options:
    """Return options for the keys from `first` on.

    Args:
        options: Options for all keys.
        first: First key that is kept.
        offset: Key of the first query's own token, counted from `first`.
    """
    mask, bias = (
        t if t is None or t.shape[-1] == 1 else t[..., first:] for t in (options.mask, options.bias)
    )
    return replace(options, mask=mask, bias=bias, offset=offset)


def add_score_bias(score: PairScore, options: Options) -> Options:
    """Return options whose bias includes all additions to the dot product.

    Raises:
        ValueError: The score is not a plain dot product with additions.
    """
    first, *rest = score.terms
    if first.term is not DOT or first.gate is not None:
        raise ValueError(
            f"trilinear takes the place of the score, and here that is {score.score_key!r}; allowed: the host's own "
            "dot product, and a bias"
        )
    return replace(options, bias=sum_biases(tuple(rest), None, options.bias)) if rest else options
