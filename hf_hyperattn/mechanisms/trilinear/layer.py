"""Trilinear attention inside a host: the second key and value are learned linear images of the first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ...engines import DOT, Options, PairScore
from ...engines.sdpa import dense
from ..base import Host, HostCall, MechanismLayer, Plan
from ..places import first_query
from .attention import attend
from .bidaf import BidafLayer
from .config import TrilinearConfig
from .pairs import Windows
from .rows import cut_rows


def trilinear_layer(config: TrilinearConfig, host: Host | None, mode: str = "replace", heads=None):
    """The layer of the form that the config asks for; arguments as in `MechanismLayer`."""
    kind = BidafLayer if config.form == "bidaf" else SimplicialLayer
    return kind(config, host, mode, heads)


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

    def __init__(self, config: TrilinearConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        check_host(config, host)
        self.host, width, groups = host.name, host.head_dim, host.kv_heads
        self.width = width
        self.rank = config.rank or width
        self.windows = config.windows or (None, None)
        gated = mode == "blend" and (self.windows[0] is not None or self.rank < width)
        self.gate = self.per_head(host) if gated else None
        self.key_map = nn.Parameter(torch.zeros(groups, width, width))
        self.value_map = nn.Parameter(torch.zeros(groups, host.value_dim, host.value_dim))
        if config.tensor == "distmult":
            self.diagonal = nn.Parameter(torch.zeros(host.heads, width))
        if config.tensor == "cp":
            self.query_factor = nn.Parameter(torch.zeros(host.heads, self.rank, width))
            self.key_factor = nn.Parameter(torch.zeros(groups, self.rank, width))
            self.key2_factor = nn.Parameter(torch.zeros(groups, self.rank, width))

    def change(self, plan: Plan) -> Plan:
        given = dict(
            self.named_parameters()
        )  # now: under offload they are here only while the layer is called
        return plan.change(attend=partial(self.attend, plan.call, plan.attend, given))

    def attend(
        self,
        call: HostCall,
        original,
        given: dict[str, Tensor],
        score: PairScore,
        value: Tensor,
        options: Options,
        backend="auto",
        weights=False,
    ) -> tuple[Tensor, Tensor | None]:
        """Three-way attention, beside the host's own where both are wanted.

        Args:
            original: computes the host's own.
            given: the parameters by name.
            score, value, options, backend, weights: as in `engines.attention`.
        """
        plain = with_bias(score, options)
        start = first_query(call, "trilinear", self.host) if self.windows != (None, None) else options.offset
        known = start if isinstance(start, int) else 0
        value, given = value.to(score.query.dtype), {n: p.to(score.query.dtype) for n, p in given.items()}
        self.check_call(score.key, value, given)
        query, keys = self.features(score.query, score.key, given)
        found = attend(
            query,
            keys,
            (value, 1 + value @ given["value_map"].mT),
            replace(plain, offset=known),
            Windows(*self.windows, call.is_causal),
            offset=None if isinstance(start, int) else start,
            backend=backend,
            weights=weights,
        )
        gate = given.get("gate")
        share = self.share(call, start, gate, value.dtype)
        if share is None:
            return (
                found if gate is None else (found[0] + 0.0 * gate.sum(), found[1])
            )  # it has a gradient, zero
        own = original(score, value, options, backend=backend, weights=weights)
        return tuple(None if a is None else a + share * (b - a) for a, b in zip(own, found, strict=True))

    def share(
        self, call: HostCall, start: int | Tensor, gate: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """How much of three-way attention every output has, [B|1, H, N, 1]; None for all of it."""
        chosen = self.chosen(call.query)
        cut = None if gate is None else self.cut(call, start)
        if cut is None and chosen is None:
            return None
        share = torch.ones((), dtype=dtype, device=call.query.device)
        if cut is not None:
            share = torch.where(cut, gate[:, None], share)
        if chosen is not None:
            share = share * chosen.to(dtype)[:, None]
        return share[..., None]

    def cut(self, call: HostCall, start: int | Tensor) -> Tensor | None:
        """Which queries have the gate, bool [B|1, H|1, N]; None for none of them."""
        if self.rank < self.width:
            return torch.ones(1, 1, call.query.shape[2], dtype=torch.bool, device=call.query.device)
        if call.key.shape[2] <= self.windows[0]:
            return None
        return cut_rows(call, start, self.windows[0])

    def features(self, query: Tensor, key: Tensor, given: dict) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """q, k and k2 after the tensor's maps."""
        key2 = 1 + key @ given["key_map"].mT
        if self.config.tensor == "distmult":
            return query * (1 + given["diagonal"])[:, None], (key, key2)
        if self.config.tensor == "cp":
            parts = (("query", query), ("key", key), ("key2", key2))
            # the first R rows of the unit matrix, plus what was learned, times x
            query, key, key2 = (x[..., : self.rank] + x @ given[f"{n}_factor"].mT for n, x in parts)
        return query, (key, key2)

    def check_call(self, key: Tensor, value: Tensor, given: dict) -> None:
        """Raise where keys or values are not of the shape that the host was patched for."""
        found = (key.shape[1], key.shape[-1], value.shape[-1])
        expected = (len(given["key_map"]), self.width, given["value_map"].shape[-1])
        if found != expected:
            raise ValueError(
                f"trilinear was built for {expected[0]} key heads of {expected[1]} and values of {expected[2]} numbers "
                f"in {self.host}, and its attention is called with {found[0]}, {found[1]} and {found[2]}; allowed: "
                "hosts whose config says what they hand over, choose them with layers=..."
            )

    def identical(self) -> bool:
        if self.rank < self.width:
            return self.gate is not None and not bool(self.gate.any())
        exact = self.gate is not None or self.windows[0] is None
        return exact and not any(bool(p.any()) for p in self.parameters())


def check_host(config: TrilinearConfig, host: Host | None) -> None:
    """Refuse hosts that three-way attention cannot be built for."""
    if host is None:
        raise ValueError(
            "trilinear has parameters to learn; allowed: patch_model(model, TrilinearConfig(...))"
        )
    if host.head_dim is None or host.value_dim is None:
        raise ValueError(
            f"trilinear needs the head dimensions of {host.name}, and nothing tells them; allowed: hosts with key and "
            "value projections, choose them with layers=..."
        )
    if config.rank is not None and config.rank > host.head_dim:
        raise ValueError(
            f"TrilinearConfig.rank={config.rank} is not allowed; allowed: 1 to {host.head_dim}, the head dimension of "
            f"{host.name}"
        )
    if host.is_cross and config.windows is not None:
        raise ValueError(
            f"TrilinearConfig.windows={config.windows} has no meaning for cross-attention ({host.name}); allowed: "
            "windows=None, or include_cross_attention=False"
        )


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
    return replace(options, bias=dense(tuple(rest), None, options.bias)) if rest else options
