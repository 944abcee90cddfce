"""From head vectors to what engines see of the cone scores (terms.py), and cone attention inside a host."""

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
from .reference import CLAMP, FLOOR, MAPPINGS, definition, horizontal, of_parts, xi_height


@dataclass(frozen=True, eq=False)
class ConeSpace:
    """The variant of the score, and its parameters: gamma and radius, each a number, or a tensor [H] or [1]."""

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
        """The score of queries [B, H, N, d] and keys [B, Hkv, M, d], unscaled.

        Args:
            scale: of a host's product that it reads, scale · q·k; None: it reads that of the horizontal parts.
            gate, capped: as in `ScoreTerm`.
        """
        name, reader = KINDS[self.variant, self.mapping, self.squared, self.clamp_heights]
        vectors, gamma, radius = ConeVectors(query, key, self, scale), self.gamma, self.radius
        head = (
            () if self.variant == "umbral" else (radius**2 * (gamma if self.squared else gamma**2),)
        )
        term = ScoreTerm(
            TERMS[name if scale is None else f"{name}_on_product"],
            vectors.definition,
            gate=gate,
            statistics=vectors.statistics,
            capped=capped,
            # decoding takes distances from differences, for which it does not read the last parameter
            reader=VectorReader(reader, (gamma, radius), (*head, 1.0)),
            points=vectors.points,
        )
        if scale is not None:
            return PairScore(query, key, (term,), scale)
        return PairScore(query, key, (term,), 1.0, query.shape[-1] - 1, vectors.features)


def read(kind, row, column, head):
    """See `Reader`: the statistics before |X|². Parameters: gamma and the radius."""
    (variant, mapping, squared, clamp_heights), (dim,), (last, side), (gamma, radius) = (
        kind,
        row,
        column,
        head,
    )
    height, stretch = of_parts(last, side, dim, mapping, radius)
    if variant == "umbral":
        half = gamma / 2
        return stretch * (half / torch.sinh(radius)), (height * half,)
    weight = gamma.sqrt() if squared else gamma
    height, rim = height * weight, radius * weight
    height = torch.minimum(height, CLAMP * rim) if clamp_heights else height
    square = rim * rim
    return stretch * weight, (
        height * height,
        torch.maximum(square - height * height, FLOOR * square).sqrt(),
    )


#: The names of the term and of the reader of each kind of score: variant, mapping, squared, clamp_heights.
KINDS: dict[tuple[str, str, bool, bool], tuple[str, str]] = {}
for _kind in product(("umbral", "penumbral"), MAPPINGS, (True, False), (True, False)):
    _variant, _mapping, _squared, _clamp = _kind
    _reader = f"cone {_variant} {_mapping} squared={_squared} clamp={_clamp}"
    KINDS[_kind] = (
        "umbral" if _variant == "umbral" else "penumbral" + "_squared" * _squared,
        _reader,
    )
    READERS[_reader] = Reader(_reader, partial(read, _kind), 2, left_out=1)


@dataclass(eq=False)
class ConeVectors:
    """Queries and keys as points. They are computed once for all heads that share a key, at gamma = 1 and, for psi, at
    r = 1; gamma and r then multiply heights, distances and the radius.
    """

    query: Tensor
    key: Tensor
    space: ConeSpace
    scale: float | None
    stretches: list[Tensor] = field(
        default_factory=list
    )  # of queries [B, H, N] and of keys [B, Hkv, M]
    horizontals: tuple[Tensor, Tensor] | None = None

    def statistics(self) -> Numbers:
        """The term's numbers: of rows and columns (h,) for umbral and (h², sqrt(r² - h²)) for penumbral, |X|², and on
        the host's product the stretch and the last coordinate; of heads r² for penumbral, and what squared distances
        are multiplied with.
        """
        query, key, space, scale = self.query, self.key, self.space, self.scale
        dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
        heads, kv_heads, dim, numbers = query.shape[1], key.shape[1], query.shape[-1], []
        for number in (space.gamma, space.radius):
            if isinstance(number, Tensor):
                numbers.append(number.to(dtype))
            else:
                numbers.append(torch.full((1,), number, dtype=dtype, device=query.device))
        gamma, radius = torch.broadcast_tensors(*numbers)
        weight = (
            gamma.sqrt() if space.squared else gamma
        )  # penumbral lengths are stretched so that gamma becomes 1
        if space.variant == "umbral":
            height_factor = gamma / 2
            gap_factor = height_factor * (2 * torch.exp(-radius) / -torch.expm1(-2 * radius))
        else:
            height_factor = gap_factor = weight
        if space.mapping == "psi":  # it scales lengths with the radius, other mappings know none
            height_factor, gap_factor = radius * height_factor, radius * gap_factor
        rim = (radius * weight)[:, None]
        self.stretches, sides = [], []
        norms = squared_norms((query, key), dtype, dim - 1)
        for x, norm, is_key in ((query, norms[0], False), (key, norms[1], True)):
            last = x[..., -1].to(dtype)
            if space.mapping == "xi":
                height = stretch = xi_height(last, dim)
            elif space.mapping == "psi":
                height = stretch = torch.sigmoid(last)
            else:
                height, stretch = of_parts(last, norm, dim, "expmap")
            self.stretches.append(stretch)
            length = (
                norm * stretch * stretch
            )  # |X|²; 0 too where expmap stretches so far that the square is infinite
            if len(gamma) > 1 and x.shape[1] != heads:
                owner = torch.arange(heads, device=x.device) // (heads // kv_heads)
                height = height.index_select(1, owner)
            height = height * height_factor[:, None]
            if space.variant == "umbral":
                statistics = [height]
            else:
                height = torch.minimum(height, CLAMP * rim) if space.clamp_heights else height
                height_squared = height**2
                half_width = torch.sqrt(torch.maximum(rim**2 - height_squared, FLOOR * rim**2))
                statistics = [height_squared, half_width]
            if scale is None:
                statistics.append(length)
            else:
                statistics += (
                    (length, stretch, last) if is_key else (length, stretch / scale, last * scale)
                )
            sides.append(statistics)
        head = [(gap_factor**2).expand(heads)]
        if space.variant != "umbral":
            head.insert(0, (rim[:, 0] ** 2).expand(heads))
        query_factor, key_factor = self.stretches
        return Numbers(
            sides[0], sides[1], head, (query_factor, key_factor) if scale is None else None
        )

    def features(self) -> tuple[Tensor, Tensor]:
        """The points' horizontal parts, [B, H, N, d - 1] and [B, Hkv, M, d - 1]."""
        if self.horizontals is None:
            if not self.stretches:
                self.statistics()
            pairs = zip((self.query, self.key), self.stretches, strict=True)
            query, key = (horizontal(x.to(stretch.dtype), stretch) for x, stretch in pairs)
            self.horizontals = query, key
        return self.horizontals

    def points(self) -> Points:
        """What distances are measured between: these very numbers, since a factor would be rounded."""
        return Points(*self.features())

    def definition(self) -> Tensor:
        """The dense logits."""
        s, device = self.space, self.query.device
        numbers = (s.gamma, s.radius)
        gamma, radius = (
            torch.as_tensor(x, dtype=torch.float64, device=device).reshape(-1) for x in numbers
        )
        return definition(
            *(self.query, self.key, gamma, radius),
            variant=s.variant,
            mapping=s.mapping,
            squared=s.squared,
            clamp_heights=s.clamp_heights,
        )


class ConeLayer(ScoreLayer):
    """Cone attention inside a host: gamma and radius of each query head are learned, see `ScoreLayer`."""

    learned = ("gamma", "radius")

    def __init__(self, config: ConeConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.space = partial(
            ConeSpace, config.variant, config.resolved_mapping, config.squared, config.clamp_heights
        )
