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
from ...engines.score import (
    READERS,
    TERMS,
    Numbers,
    PairScore,
    Points,
    Reader,
    ScoreTerm,
    VectorReader,
)
from ..base import Host
from ..score_layer import ScoreLayer
from .config import ConeConfig
from .reference import (
    CLAMP,
    FLOOR,
    MAPPINGS,
    definition,
    height_and_stretch_from_parts,
    horizontal,
    inverse_sinh,
)


@dataclass(frozen=True, eq=False)
class ConeSpace:
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
    gamma: Tensor | float
    radius: Tensor | float

    def score(
        self,
        query: Tensor,
        key: Tensor,
        scale: float | None = None,
        gate: Tensor | None = None,
        capped: bool = False,
    ) -> PairScore:
        """Return the cone score of queries and keys.

        Args:
            query: Queries [B, H, N, d], unscaled.
            key: Keys [B, Hkv, M, d], unscaled.
            scale: If given, the score reads the layer's product scale · q·k. None (default): it
                reads the product of the horizontal parts.
            gate, capped: As in `ScoreTerm`.
        """
        name, reader = KINDS[self.variant, self.mapping, self.squared, self.clamp_heights]
        vectors = ConeVectors(query, key, self, scale)
        gamma, radius = self.gamma, self.radius
        head: tuple[Tensor | float, ...] = ()
        if self.variant == "penumbral":
            # r² of the scaled lengths, in which gamma is 1.
            head = (radius**2 * (gamma if self.squared else gamma**2),)
        term = ScoreTerm(
            TERMS[name if scale is None else f"{name}_on_product"],
            vectors.compute_logits,
            gate=gate,
            statistics=vectors.compute_statistics,
            capped=capped,
            # The last head parameter w is 1 here: the reader's factors already include its root.
            reader=VectorReader(reader, (gamma, radius), (*head, 1.0)),
            points=vectors.make_points,
        )
        if scale is not None:
            return PairScore(query, key, (term,), scale)
        return PairScore(query, key, (term,), 1.0, query.shape[-1] - 1, vectors.compute_features)


def read_statistics(kind, row, column, head):
    """Return the factor of a vector and its statistics before |X|², see `Reader`.

    Args:
        kind: Variant, mapping, squared and clamp_heights.
        row, column: As in `Reader`.
        head: gamma and the radius.
    """
    variant, mapping, squared, clamp_heights = kind
    (dim,) = row
    last, side = column
    gamma, radius = head
    height, stretch = height_and_stretch_from_parts(last, side, dim, mapping, radius)
    if variant == "umbral":
        half = gamma / 2
        return stretch * (half / torch.sinh(radius)), (height * half,)
    # Scale all lengths so that gamma becomes 1.
    weight = gamma.sqrt() if squared else gamma
    height, rim = height * weight, radius * weight
    height = torch.minimum(height, CLAMP * rim) if clamp_heights else height
    square = rim * rim
    factor = stretch * weight
    height_squared = height * height
    half_width = torch.maximum(square - height_squared, FLOOR * square).sqrt()
    return factor, (height_squared, half_width)


#: Names of the term and the reader, by variant, mapping, squared and clamp_heights.
KINDS: dict[tuple[str, str, bool, bool], tuple[str, str]] = {}
for _kind in product(("umbral", "penumbral"), MAPPINGS, (True, False), (True, False)):
    _variant, _mapping, _squared, _clamp = _kind
    _reader = f"cone {_variant} {_mapping} squared={_squared} clamp={_clamp}"
    # An umbral score has no squared form; its two flags are ignored.
    _term = "umbral" if _variant == "umbral" else "penumbral" + "_squared" * _squared
    KINDS[_kind] = (_term, _reader)
    READERS[_reader] = Reader(_reader, partial(read_statistics, _kind), 2, left_out=1)


@dataclass(eq=False)
class ConeVectors:
    """Queries and keys as points of the half-space.

    Points are computed once for all heads that share a key, at gamma = 1 and, for psi, at r = 1.
    Heights, distances and the radius are then multiplied by factors of gamma and r.

    Args:
        query: Queries [B, H, N, d].
        key: Keys [B, Hkv, M, d].
        space: Variant and parameters of the score.
        scale: As in `ConeSpace.score`.

    Attributes:
        stretches: Stretch of queries [B, H, N] and of keys [B, Hkv, M], once computed.
        horizontals: Horizontal parts of queries and keys, once computed.
    """

    query: Tensor
    key: Tensor
    space: ConeSpace
    scale: float | None
    stretches: list[Tensor] = field(default_factory=list)
    horizontals: tuple[Tensor, Tensor] | None = None

    def compute_statistics(self) -> Numbers:
        """Return the numbers that the term reads.

        Rows and columns have (h,) for umbral or (h², sqrt(r² - h²)) for penumbral, then |X|². If the
        score reads the layer's product, the stretch and the last coordinate follow. Heads have r²
        for penumbral, then the factor of squared distances.
        """
        query, key, space, scale = self.query, self.key, self.space, self.scale
        dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
        heads, dim = query.shape[1], query.shape[-1]
        gamma, radius = self.broadcast_parameters(dtype)
        height_factor, gap_factor, rim = self.compute_factors(gamma, radius)
        self.stretches, sides = [], []
        norms = squared_norms((query, key), dtype, dim - 1)
        for x, norm, is_key in ((query, norms[0], False), (key, norms[1], True)):
            last = x[..., -1].to(dtype)
            if space.mapping == "psi":
                # At radius 1, without multiplying by it: the head factors contain r.
                height = stretch = torch.sigmoid(last)
            else:
                height, stretch = height_and_stretch_from_parts(last, norm, dim, space.mapping)
            self.stretches.append(stretch)
            # |X|². It stays 0 for norm 0, even if the square of the stretch alone would overflow.
            length = norm * stretch * stretch
            if len(gamma) > 1 and x.shape[1] != heads:
                owner = torch.arange(heads, device=x.device) // (heads // key.shape[1])
                height = height.index_select(1, owner)
            statistics = self.scale_heights(height * height_factor[:, None], rim)
            if scale is None:
                statistics.append(length)
            elif is_key:
                statistics += (length, stretch, last)
            else:
                # `dot` is scale · q·k, so the query's numbers take the scale out of it again.
                statistics += (length, stretch / scale, last * scale)
            sides.append(statistics)
        head = [(gap_factor**2).expand(heads)]
        if space.variant != "umbral":
            head.insert(0, (rim[:, 0] ** 2).expand(heads))
        query_factor, key_factor = self.stretches
        factors = (query_factor, key_factor) if scale is None else None
        return Numbers(row=sides[0], column=sides[1], head=head, factors=factors)

    def broadcast_parameters(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return gamma and the radius as tensors, both [H] or both [1]."""
        numbers = []
        for number in (self.space.gamma, self.space.radius):
            if isinstance(number, Tensor):
                numbers.append(number.to(dtype))
            else:
                numbers.append(torch.full((1,), number, dtype=dtype, device=self.query.device))
        gamma, radius = torch.broadcast_tensors(*numbers)
        return gamma, radius

    def compute_factors(self, gamma: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors of heights and of distances, [H] or [1], and the scaled radius [H|1, 1].

        Args:
            gamma, radius: Parameters, both [H] or both [1].
        """
        # Penumbral lengths are scaled so that gamma becomes 1.
        weight = gamma.sqrt() if self.space.squared else gamma
        if self.space.variant == "umbral":
            height_factor = gamma / 2
            gap_factor = height_factor * inverse_sinh(radius)
        else:
            height_factor = gap_factor = weight
        # psi scales lengths with the radius; the other mappings do not read it.
        if self.space.mapping == "psi":
            height_factor, gap_factor = radius * height_factor, radius * gap_factor
        return height_factor, gap_factor, (radius * weight)[:, None]

    def scale_heights(self, height: Tensor, rim: Tensor) -> list[Tensor]:
        """Return the statistics before |X|²: (h,), or (h², sqrt(r² - h²)) for penumbral.

        Args:
            height: Scaled heights [B, H, N].
            rim: Scaled radius [H|1, 1].
        """
        if self.space.variant == "umbral":
            return [height]
        height = torch.minimum(height, CLAMP * rim) if self.space.clamp_heights else height
        height_squared = height**2
        # The lower bound keeps the slope of the root finite where the height reaches the radius.
        return [height_squared, torch.sqrt(torch.maximum(rim**2 - height_squared, FLOOR * rim**2))]

    def compute_features(self) -> tuple[Tensor, Tensor]:
        """Return the horizontal parts, [B, H, N, d - 1] and [B, Hkv, M, d - 1]."""
        if self.horizontals is None:
            if not self.stretches:
                self.compute_statistics()
            pairs = zip((self.query, self.key), self.stretches, strict=True)
            query, key = (horizontal(x.to(stretch.dtype), stretch) for x, stretch in pairs)
            self.horizontals = query, key
        return self.horizontals

    def make_points(self) -> Points:
        """Return the points between which distances are measured."""
        # Unscaled, because a factor would round them, and near points differ in the last digits.
        return Points(*self.compute_features())

    def compute_logits(self) -> Tensor:
        """Return the dense logits [B, H, N, M] from the definition."""
        space, device = self.space, self.query.device
        gamma, radius = (
            torch.as_tensor(x, dtype=torch.float64, device=device).reshape(-1)
            for x in (space.gamma, space.radius)
        )
        return definition(
            self.query,
            self.key,
            gamma,
            radius,
            variant=space.variant,
            mapping=space.mapping,
            squared=space.squared,
            clamp_heights=space.clamp_heights,
        )


class ConeLayer(ScoreLayer):
    """Cone attention in an attention layer. Each query head learns gamma and the radius.

    Parameters and modes are described in `ScoreLayer`.
    """

    learned = ("gamma", "radius")

    def __init__(self, config: ConeConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.space = partial(
            ConeSpace, config.variant, config.resolved_mapping, config.squared, config.clamp_heights
        )
