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

from ...engines.score import READERS, Numbers, Reader, VectorReader, repeat_heads, working_dtype
from ..base import Host, Plan
from ..score_layer import PointSpace, PointVectors, ScoreLayer
from .config import HyperbolicConfig
from .midpoint import make_aggregation
from .reference import (
    definition,
    direction_and_norm,
    half_radii,
    measure_norms,
    read_norm,
)


class HyperbolicVectors(PointVectors):
    """Queries and keys as points of the ball. The engines' points are their directions.

    Norms do not depend on c, so heads of different curvature can share a key.
    """

    def measure_norms(self) -> list[Tensor]:
        """Return norms of scale · x, [B, H, N] and [B, Hkv, M], in the working dtype."""
        dtype = working_dtype(self.query, self.key)
        scale = self.space.get_scale(self.query.shape[-1])
        return [measure_norms(x, dtype, scale) for x in (self.query, self.key)]

    def compute_statistics(self) -> Numbers:
        """Return the numbers that the term reads.

        Rows and columns have sinh a and cosh a. If the score reads the layer's product, the inverse
        norms follow. Heads have β.
        """
        scale = self.space.get_scale(self.query.shape[-1])
        query_norm, key_norm = self.measure_norms()
        c, tau = self.space.read_parameters(query_norm.dtype, self.query.device)
        row, column = (
            [torch.sinh(a), torch.cosh(a)]
            for a in (half_radii(query_norm, c), half_radii(key_norm, c))
        )
        factors = None
        if self.scale is None:
            factors = 1 / query_norm, scale / key_norm
        else:
            row.append(scale / self.scale / query_norm)
            column.append(scale / key_norm)
        head = [compute_beta(self.space.distance, c, tau).expand(self.query.shape[1])]
        return Numbers(row=row, column=column, head=head, factors=factors)

    def compute_features(self) -> tuple[Tensor, Tensor]:
        """Return unit vectors, [B, H, N, d] and [B, Hkv, M, d]."""
        dtype = working_dtype(self.query, self.key)
        scale = self.space.get_scale(self.query.shape[-1])
        query, key = (direction_and_norm(x.to(dtype), scale)[0] for x in (self.query, self.key))
        return query, key

    @property
    def linear_features(self) -> Callable[[], tuple[Tensor, Tensor]] | None:  # type: ignore[override]
        """Features whose product is the score; the geodesic distance has none."""
        if self.space.distance == "geodesic":
            return None
        return partial(squared_lorentz_features, self.query, self.key, self.space)


@dataclass(frozen=True, eq=False)
class HyperbolicSpace(PointSpace):
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

    vectors = HyperbolicVectors
    learned = ("curvature", "temperature")

    @property
    def term(self) -> str:
        """Name of the term."""
        return self.distance

    def get_scale(self, dim: int) -> float:
        """Return the factor of vectors: `scale`, or 1/sqrt(d) if it is None."""
        return float(dim) ** -0.5 if self.scale is None else self.scale

    def make_reader(self, dim: int) -> VectorReader:
        """Return the reader of sinh a and cosh a."""
        beta = compute_beta(self.distance, self.curvature, self.temperature)
        return VectorReader(
            name="hyperbolic", parameters=(self.curvature, self.get_scale(dim)), head=(beta,)
        )

    def compute_logits(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the dense logits [B, H, N, M] from the definition."""
        c, tau = self.read_parameters(torch.float64, query.device)
        scale = self.get_scale(query.shape[-1])
        return definition(query, key, c, tau, scale=scale, distance=self.distance)


def read_statistics(row, column, head):
    """Return the factor of a vector, with sinh a and cosh a, see `Reader`.

    Args:
        row: Unused.
        column, head: As in `read_norm`.
    """
    _, scale = head
    norm, a = read_norm(column, head)
    sine = torch.sinh(a)
    return scale / norm, (sine, (1 + sine * sine).sqrt())


READERS["hyperbolic"] = Reader("hyperbolic", read_statistics, 2)


def compute_beta(distance: str, c: Any, tau: Any) -> Any:
    """Return the factor β of a score: 1/(τ√c) for "geodesic", 4/(cτ) for "squared_lorentz"."""
    return 1 / (tau * c**0.5) if distance == "geodesic" else 4 / (c * tau)


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
    dtype = working_dtype(query, key)
    c, tau = space.read_parameters(dtype, query.device)
    scale = space.get_scale(query.shape[-1])
    sides = []
    for x in (query, key):
        direction, norm = direction_and_norm(x.to(dtype), scale)
        a = half_radii(norm, c)
        sides.append((direction, torch.sinh(a), torch.cosh(a)))
    (q, sinh_q, cosh_q), (k, sinh_k, cosh_k) = sides
    one = torch.ones_like(sinh_q)[..., None]
    u_k = sinh_k.square()[..., None]
    q = torch.cat([(2 * sinh_q * cosh_q)[..., None] * q, -sinh_q.square()[..., None], -one], dim=-1)
    k = (sinh_k * cosh_k)[..., None] * repeat_heads(k, sinh_k.shape[1])
    weight = compute_beta("squared_lorentz", c, tau).expand(query.shape[1])[:, None, None]
    return weight * q, torch.cat([k, 1 + 2 * u_k, u_k], dim=-1)


class HyperbolicLayer(ScoreLayer):
    """Hyperbolic-distance attention in an attention layer.

    Each query head learns curvature and temperature, see `ScoreLayer`. With
    aggregation="einstein", the output is the midpoint. In blend it is (1 - g')·mean + g'·midpoint,
    where g' is the parameter `midpoint_gate`, which starts at 0. Vectors are scaled with 1/sqrt(d),
    whatever the scale of the attention layer is.
    """

    learned = HyperbolicSpace.learned

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
