"""Make scores that read the distances of points: a factor times the numbers of a vector.

Read `PointSpace.score` to see how the numbers of cone and hyperbolic attention reach the engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..engines.score import READERS, TERMS, Numbers, PairScore, Points, ScoreTerm, VectorReader


@dataclass(eq=False)
class PointVectors:
    """Queries and keys as points, for one call. Subclasses compute what engines read.

    Args:
        query: Queries [B, H, N, d], unscaled.
        key: Keys [B, Hkv, M, d], unscaled.
        space: Settings and parameters of the score.
        scale: As in `PointSpace.score`.
    """

    query: Tensor
    key: Tensor
    space: Any
    scale: float | None

    #: As in `ScoreTerm`.
    linear_features: ClassVar[Any] = None

    def compute_statistics(self) -> Numbers:
        """Return the numbers that the term reads besides the product."""
        raise NotImplementedError

    def compute_features(self) -> tuple[Tensor, Tensor]:
        """Return the points, [B, H, N, p] and [B, Hkv, M, p], in the working dtype."""
        raise NotImplementedError

    def compute_logits(self) -> Tensor:
        """Return the dense logits [B, H, N, M] from the definition."""
        return self.space.compute_logits(self.query, self.key)

    def make_points(self) -> Points:
        """Return the points between which distances are measured."""
        return Points(*self.compute_features())


class PointSpace:
    """Base of the settings and parameters of a score that reads the distances of points."""

    #: Class of the queries and keys of one call.
    vectors: ClassVar[type[PointVectors]]
    #: Fields that are parameters of the definition, which layers learn.
    learned: ClassVar[tuple[str, ...]]

    @property
    def term(self) -> str:
        """Name of the term that reads the product of points.

        The term with the suffix "_on_product" reads the product of the attention layer's vectors.
        """
        raise NotImplementedError

    @property
    def parameters(self) -> tuple[Tensor | float, ...]:
        """Values of `learned`: numbers, or tensors [H] or [1]."""
        return tuple(getattr(self, name) for name in self.learned)

    def make_reader(self, dim: int) -> VectorReader:
        """Return the reader of the term's statistics, for vectors of `dim` numbers."""
        raise NotImplementedError

    def get_scale(self, dim: int) -> float:
        """Return the factor of vectors of `dim` numbers before they become points. Default: 1."""
        return 1.0

    def compute_logits(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the dense logits [B, H, N, M] from the definition."""
        raise NotImplementedError

    def read_parameters(self, dtype: torch.dtype, device: Any) -> list[Tensor]:
        """Return the parameters as tensors, all [H] or all [1]."""
        tensors = [
            x.to(dtype=dtype, device=device).reshape(-1)
            if isinstance(x, Tensor)
            else torch.full((1,), x, dtype=dtype, device=device)
            for x in self.parameters
        ]
        return list(torch.broadcast_tensors(*tensors))

    def score(
        self,
        query: Tensor,
        key: Tensor,
        scale: float | None = None,
        gate: Tensor | None = None,
        capped: bool = False,
    ) -> PairScore:
        """Return the score of queries and keys.

        Args:
            query: Queries [B, H, N, d], unscaled.
            key: Keys [B, Hkv, M, d], unscaled.
            scale: If given, the score reads the layer's product scale · q·k. None (default): it
                reads the product of the points.
            gate, capped: As in `ScoreTerm`.
        """
        dim = query.shape[-1]
        vectors = self.vectors(query=query, key=key, space=self, scale=scale)
        reader = self.make_reader(dim)
        term = ScoreTerm(
            term=TERMS[self.term if scale is None else f"{self.term}_on_product"],
            definition=vectors.compute_logits,
            gate=gate,
            statistics=vectors.compute_statistics,
            capped=capped,
            linear_features=vectors.linear_features,
            reader=reader,
            points=vectors.make_points,
        )
        if scale is not None:
            return PairScore(raw_query=query, raw_key=key, terms=(term,), scale=scale)
        left_out = READERS[reader.name].left_out
        return PairScore(
            raw_query=query,
            raw_key=key,
            terms=(term,),
            scale=self.get_scale(dim),
            width=dim - left_out if left_out else None,
            make_features=vectors.compute_features,
        )
