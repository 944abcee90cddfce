"""Prepare cone scores for the engines, and provide the cone layer of a patched model.

Here you learn which numbers of head vectors the terms (terms.py) read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ...engines.cpu import squared_norms
from ...engines.score import READERS, Numbers, Reader, VectorReader
from ..base import Host
from ..score_layer import PointSpace, PointVectors, ScoreLayer
from .config import ConeConfig
from .reference import (
    MAPPINGS,
    clamp_height,
    definition,
    half_width,
    height_and_stretch_from_parts,
    horizontal,
    inverse_sinh,
)


@dataclass(eq=False)
class ConeVectors(PointVectors):
    """Queries and keys as points of the half-space.

    Points are computed once for all heads that share a key, at gamma = 1 and, for psi, at r = 1.
    Heights, distances and the radius are then multiplied by factors of gamma and r.

    Attributes:
        stretches: Stretch of queries [B, H, N] and of keys [B, Hkv, M], once computed.
        horizontals: Horizontal parts of queries and keys, once computed.
    """

    stretches: list[Tensor] = field(default_factory=list)
    horizontals: tuple[Tensor, Tensor] | None = None

    def compute_statistics(self) -> Numbers:
        """Return the numbers that the term reads.

        Rows and columns have (h,) for umbral or (h², sqrt(r² - h²)) for penumbral, then |X|². If the
        score reads the layer's product, the stretch and the last coordinate follow. Heads have r²
        for penumbral, then the factor of squared distances.
        """
        space, scale = self.space, self.scale
        dtypes = self.query.dtype, self.key.dtype
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        heads, dim = self.query.shape[1], self.query.shape[-1]
        gamma, radius = space.read_parameters(dtype, self.query.device)
        height_factor, gap_factor, rim = space.compute_factors(gamma, radius)
        self.stretches, sides, lasts = [], [], []
        norms = squared_norms((self.query, self.key), dtype, dim - 1)
        for x, norm in zip((self.query, self.key), norms, strict=True):
            last = x[..., -1].to(dtype)
            height, stretch = height_and_stretch_from_parts(last, norm, dim, space.mapping)
            # |X|². It stays 0 for norm 0, even if the square of the stretch alone would overflow.
            length = norm * stretch * stretch
            if len(gamma) > 1 and x.shape[1] != heads:
                owner = torch.arange(heads, device=x.device) // (heads // self.key.shape[1])
                height = height.index_select(1, owner)
            heights = space.scale_heights(height * height_factor[:, None], rim)
            sides.append([*heights, length])
            self.stretches.append(stretch)
            lasts.append(last)
        row, column = sides
        query_stretch, key_stretch = self.stretches
        factors = None
        if scale is None:
            factors = query_stretch, key_stretch
        else:
            # `dot` is scale · q·k, so the query's numbers take the scale out of it again.
            row += query_stretch / scale, lasts[0] * scale
            column += key_stretch, lasts[1]
        head = [(gap_factor**2).expand(heads)]
        if space.variant == "penumbral":
            head.insert(0, (rim[:, 0] ** 2).expand(heads))
        return Numbers(row=row, column=column, head=head, factors=factors)

    def compute_features(self) -> tuple[Tensor, Tensor]:
        """Return the horizontal parts, [B, H, N, d - 1] and [B, Hkv, M, d - 1].

        They are not scaled, because a factor would round them, and near points differ in the last
        digits.
        """
        if self.horizontals is None:
            if not self.stretches:
                self.compute_statistics()
            pairs = zip((self.query, self.key), self.stretches, strict=True)
            query, key = (horizontal(x.to(stretch.dtype), stretch) for x, stretch in pairs)
            self.horizontals = query, key
        return self.horizontals


@dataclass(frozen=True, eq=False)
class ConeSpace(PointSpace):
    """Variant and parameters of a cone score.

    Args:
        variant: "umbral" or "penumbral".
        mapping: "xi", "psi" or "expmap".
        squared: Penumbral only: squared heights instead of heights.
        clamp_heights: Penumbral only: clamp heights below the radius.
        gamma: γ, a number, or a tensor [H] or [1].
        radius: r, a number, or a tensor [H] or [1].
    """

    variant: str
    mapping: str
    squared: bool
    clamp_heights: bool
    gamma: Tensor | float = 1.0
    radius: Tensor | float = 1.0

    vectors = ConeVectors
    learned = ("gamma", "radius")

    @property
    def term(self) -> str:
        """Name of the term. An umbral score has no squared form."""
        return self.variant + "_squared" * (self.variant == "penumbral" and self.squared)

    @property
    def reader(self) -> str:
        """Name of the reader."""
        return (
            f"cone {self.variant} {self.mapping} squared={self.squared} clamp={self.clamp_heights}"
        )

    def make_reader(self, dim: int) -> VectorReader:
        """Return the reader of the statistics. Its factors already include the root of w."""
        head: tuple[Tensor | float, ...] = (1.0,)
        if self.variant == "penumbral":
            # r² of the scaled lengths, in which gamma is 1.
            head = (self.radius**2 * (self.gamma if self.squared else self.gamma**2), 1.0)
        parameters = self.gamma, self.radius
        return VectorReader(name=self.reader, parameters=parameters, head=head)

    def compute_logits(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the dense logits [B, H, N, M] from the definition."""
        gamma, radius = self.read_parameters(torch.float64, query.device)
        return definition(
            query,
            key,
            gamma,
            radius,
            variant=self.variant,
            mapping=self.mapping,
            squared=self.squared,
            clamp_heights=self.clamp_heights,
        )

    def compute_factors(self, gamma: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors of heights and of distances, [H] or [1], and the scaled radius [H|1, 1].

        Args:
            gamma, radius: Parameters, both [H] or both [1].
        """
        # Penumbral lengths are scaled so that gamma becomes 1.
        weight = gamma.sqrt() if self.squared else gamma
        if self.variant == "umbral":
            height_factor = gamma / 2
            gap_factor = height_factor * inverse_sinh(radius)
        else:
            height_factor = gap_factor = weight
        # psi scales lengths with the radius; the other mappings do not read it.
        if self.mapping == "psi":
            height_factor, gap_factor = radius * height_factor, radius * gap_factor
        return height_factor, gap_factor, (radius * weight)[:, None]

    def scale_heights(self, height: Tensor, rim: Tensor) -> list[Tensor]:
        """Return the statistics before |X|²: (h,), or (h², sqrt(r² - h²)) for penumbral.

        Args:
            height: Scaled heights [B, H, N].
            rim: Scaled radius, broadcastable.
        """
        if self.variant == "umbral":
            return [height]
        if self.clamp_heights:
            height = clamp_height(height, rim)
        height_squared = height**2
        return [height_squared, half_width(height_squared, rim**2)]

    def read_statistics(self, row, column, head):
        """Return the factor of a vector and its statistics before |X|², see `Reader`.

        Args:
            row: Dimension of the vectors.
            column: The last coordinate, and the sum of squares of the others.
            head: gamma and the radius.
        """
        (dim,) = row
        last, side = column
        gamma, radius = head
        height, stretch = height_and_stretch_from_parts(last, side, dim, self.mapping, radius)
        if self.variant == "umbral":
            half = gamma / 2
            return stretch * (half / torch.sinh(radius)), (height * half,)
        # Scale all lengths so that gamma becomes 1.
        weight = gamma.sqrt() if self.squared else gamma
        return stretch * weight, self.scale_heights(height * weight, radius * weight)


# A reader for each variant, mapping, squared and clamp_heights. The last coordinate gives the height,
# so points leave it out.
for _kind in product(("umbral", "penumbral"), MAPPINGS, (True, False), (True, False)):
    _space = ConeSpace(*_kind)
    READERS[_space.reader] = Reader(_space.reader, _space.read_statistics, 2, left_out=1)


class ConeLayer(ScoreLayer):
    """Cone attention in an attention layer. Each query head learns gamma and the radius.

    Parameters and modes are described in `ScoreLayer`.
    """

    learned = ConeSpace.learned

    def __init__(self, config: ConeConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.space = partial(
            ConeSpace, config.variant, config.resolved_mapping, config.squared, config.clamp_heights
        )
