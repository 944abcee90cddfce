"""Prepare hyperbolic scores for the engines, and provide the hyperbolic layer of a patched model.

Here you learn which numbers of head vectors the terms (terms.py) read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engines.cpu import norms
from ...engines.score import (
    READERS,
    TERMS,
    Numbers,
    PairScore,
    Points,
    Reader,
    ScoreTerm,
    VectorReader,
    repeat_heads,
    working_dtype,
)
from ...geometry.scalars import at_least
from ..base import Host, Plan
from ..score_layer import ScoreLayer
from .config import HyperbolicConfig
from .midpoint import make_aggregation
from .reference import definition, direction_and_norm, half_radius, shortest


@dataclass(frozen=True, eq=False)
class HyperbolicSpace:
    """Distance and parameters of a hyperbolic score.

    Args:
        distance: "geodesic" or "squared_lorentz".
        scale: Factor of vectors before they are lifted. None: 1/sqrt(d).
        curvature: c, a number, or a tensor [H] or [1].
        temperature: τ, a number, or a tensor [H] or [1].
    """

    distance: str
    scale: float | None
    curvature: Tensor | float
    temperature: Tensor | float

    def get_scale(self, x: Tensor) -> float:
        """Return the factor of vectors: `scale`, or 1/sqrt(d) if it is None."""
        return float(x.shape[-1]) ** -0.5 if self.scale is None else self.scale

    def numbers(self, dtype: torch.dtype, device) -> tuple[Tensor, Tensor]:
        """Return c and τ as tensors, both [H] or both [1]."""
        c, tau = (
            torch.as_tensor(x, dtype=dtype, device=device).reshape(-1)
            for x in (self.curvature, self.temperature)
        )
        return torch.broadcast_tensors(c, tau)

    def score(
        self,
        query: Tensor,
        key: Tensor,
        scale: float | None = None,
        gate: Tensor | None = None,
        capped: bool = False,
    ) -> PairScore:
        """Return the hyperbolic score of queries and keys.

        Args:
            query: Queries [B, H, N, d], unscaled.
            key: Keys [B, Hkv, M, d], unscaled.
            scale: If given, the score reads the layer's product scale · q·k. None (default): it
                reads the product of the directions.
            gate, capped: As in `ScoreTerm`.
        """
        vectors = HyperbolicVectors(query, key, self, scale)
        on_product = scale is not None
        parameters = self.curvature, self.get_scale(query)
        linear = vectors.linear_features if self.distance == "squared_lorentz" else None
        term = ScoreTerm(
            TERMS[self.distance + "_on_product" * on_product],
            vectors.definition,
            gate=gate,
            statistics=vectors.statistics,
            capped=capped,
            linear_features=linear,
            reader=VectorReader(
                "hyperbolic", parameters, (beta(self.distance, self.curvature, self.temperature),)
            ),
            points=vectors.points,
        )
        if scale is not None:
            return PairScore(query, key, (term,), scale)
        return PairScore(query, key, (term,), self.get_scale(query), None, vectors.directions)


def read_statistics(row, column, head):
    """Return the factor of a vector, with sinh a and cosh a, see `Reader`.

    Args:
        row: Unused.
        column: The last number, and the sum of squares.
        head: The curvature and the scale.
    """
    _, square = column
    curvature, scale = head
    norm = at_least(scale * square.sqrt(), shortest(torch.float32))
    sine = torch.sinh(half_radius(norm, curvature))
    return scale / norm, (sine, (1 + sine * sine).sqrt())


READERS["hyperbolic"] = Reader("hyperbolic", read_statistics, 2)


def beta(distance: str, c: Any, tau: Any) -> Any:
    """Return the factor β of a score: 1/(τ√c) for "geodesic", 4/(cτ) for "squared_lorentz"."""
    return 1 / (tau * c**0.5) if distance == "geodesic" else 4 / (c * tau)


@dataclass(eq=False)
class HyperbolicVectors:
    """Queries and keys as points of the ball.

    Norms do not depend on c, so heads of different curvature can share a key.

    Args:
        query: Queries [B, H, N, d].
        key: Keys [B, Hkv, M, d].
        space: Distance and parameters of the score.
        product_scale: `scale` of `HyperbolicSpace.score`.

    Attributes:
        lengths: Norms of queries [B, H, N] and of keys [B, Hkv, M], once computed.
    """

    query: Tensor
    key: Tensor
    space: HyperbolicSpace
    product_scale: float | None
    lengths: tuple[Tensor, Tensor] | None = None

    def norms(self) -> tuple[Tensor, Tensor]:
        """Return norms of scale · x, [B, H, N] and [B, Hkv, M], in the working dtype."""
        if self.lengths is None:
            dtype, scale = working_dtype(self.query, self.key), self.space.get_scale(self.query)
            query, key = (
                at_least(scale * norms(x, dtype), shortest(dtype)) for x in (self.query, self.key)
            )
            self.lengths = query, key
        return self.lengths

    def statistics(self) -> Numbers:
        """Return the numbers that the term reads.

        Rows and columns have sinh a and cosh a. If the score reads the layer's product, the inverse
        norms follow. Heads have β.
        """
        lengths, heads, scale = self.norms(), self.query.shape[1], self.space.get_scale(self.query)
        c, tau = self.space.numbers(lengths[0].dtype, self.query.device)
        sides = []
        for norm in lengths:
            a = half_radius(repeat_heads(norm, heads) if len(c) > 1 else norm, c[:, None])
            sides.append([torch.sinh(a), torch.cosh(a)])
        if self.product_scale is not None:
            sides[0].append(scale / self.product_scale / lengths[0])
            sides[1].append(scale / lengths[1])
            factors = None
        else:
            factors = 1 / lengths[0], scale / lengths[1]
        weight = torch.as_tensor(
            beta(self.space.distance, c, tau), dtype=lengths[0].dtype, device=self.query.device
        ).expand(heads)
        return Numbers(sides[0], sides[1], [weight], factors)

    def directions(self) -> tuple[Tensor, Tensor]:
        """Return the features: unit vectors, [B, H, N, d] and [B, Hkv, M, d]."""
        dtype, scale = working_dtype(self.query, self.key), self.space.get_scale(self.query)
        query, key = (direction_and_norm(x.to(dtype), scale)[0] for x in (self.query, self.key))
        return query, key

    def points(self) -> Points:
        """Return the points between which distances are measured."""
        return Points(*self.directions())

    def linear_features(self) -> tuple[Tensor, Tensor]:
        """Return the features of `squared_lorentz_features`."""
        return squared_lorentz_features(self.query, self.key, self.space)

    def definition(self) -> Tensor:
        """Return the dense logits [B, H, N, M] from the definition."""
        space, scale = self.space, self.space.get_scale(self.query)
        c, tau = space.numbers(torch.float64, self.query.device)
        return definition(self.query, self.key, c, tau, scale=scale, distance=space.distance)


def squared_lorentz_features(
    query: Tensor, key: Tensor, space: HyperbolicSpace
) -> tuple[Tensor, Tensor]:
    """Return vectors whose plain dot product is the squared Lorentz score.

    They are for callers that need a score linear in the keys:

        S = -β (u_q + u_k + 2 u_q u_k - 2 p_q p_k cos θ)    u = sinh² a, p = sinh a cosh a, β = 4/(cτ)

    Args:
        query: Queries [B, H, N, d], unscaled.
        key: Keys [B, Hkv, M, d]. Heads are repeated if the curvature differs between query heads.
        space: Checked parameters. Its `distance` is not read.

    Returns:
        [B, H, N, d + 2] and [B, Hkv or H, M, d + 2] in the working dtype. As in every product form,
        distances that are small against the radii of both points lose their digits.
    """
    dtype, heads = working_dtype(query, key), query.shape[1]
    c, tau = space.numbers(dtype, query.device)
    sides = []
    for x in (query, key):
        direction, norm = direction_and_norm(x.to(dtype), space.get_scale(query))
        a = half_radius(repeat_heads(norm, heads) if len(c) > 1 else norm, c[:, None])
        sides.append((direction, torch.sinh(a), torch.cosh(a)))
    (q, sinh_q, cosh_q), (k, sinh_k, cosh_k) = sides
    one, u_k = torch.ones_like(sinh_q)[..., None], sinh_k.square()[..., None]
    q = torch.cat([(2 * sinh_q * cosh_q)[..., None] * q, -sinh_q.square()[..., None], -one], dim=-1)
    k = (sinh_k * cosh_k)[..., None] * repeat_heads(k, sinh_k.shape[1])
    weight = beta("squared_lorentz", c, tau).expand(heads)[:, None, None]
    return weight * q, torch.cat([k, 1 + 2 * u_k, u_k], dim=-1)


class HyperbolicLayer(ScoreLayer):
    """Hyperbolic-distance attention in an attention layer.

    Each query head learns curvature and temperature, see `ScoreLayer`. With
    aggregation="einstein", the output is the midpoint. In blend it is (1 - g')·mean + g'·midpoint,
    where g' is the parameter `midpoint_gate`, which starts at 0. Vectors are scaled with 1/sqrt(d),
    whatever the scale of the attention layer is.
    """

    learned = ("curvature", "temperature")

    def __init__(
        self, config: HyperbolicConfig, host: Host | None, mode: str = "replace", heads=None
    ):
        super().__init__(config, host, mode, heads)
        self.space: Callable = partial(HyperbolicSpace, config.distance, None)
        if config.aggregation != "einstein":
            self.midpoint_gate = None

    @property
    def gates(self) -> tuple[str, ...]:  # type: ignore[override]  # nobody sets it
        """Names of the gates. The midpoint has one of its own."""
        return ("gate", "midpoint_gate") if self.config.aggregation == "einstein" else ("gate",)

    def forward(self, plan: Plan) -> Plan:
        if self.config.aggregation != "einstein":
            return super().forward(plan)
        if self.idle():
            return plan
        changed, query = super().forward(plan), plan.call.query
        dtype = working_dtype(query, plan.call.key)
        gate = self.gate_heads(self.midpoint_gate, plan.call, dtype)
        curvature, _ = self.read_numbers(dtype)
        aggregation = make_aggregation(curvature, float(query.shape[-1]) ** -0.5, gate)
        return replace(changed, options=replace(changed.options, aggregation=aggregation))
