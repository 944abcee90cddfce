"""Interface between injection and a kind of sparse rule.

A rule of your own is a frozen dataclass with the methods of `CandidateRule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import ClassVar

from torch import Tensor

from ..config import MechanismConfig
from ..mechanisms.base import HostCall

#: Number of consecutive queries that are measured together. Chunks, because some rules select keys
#: once for 16 neighbouring queries.
CHUNK = 16


class CandidateRule(ABC):
    """Which attention logits of one head are computed, and what replaces the others.

    Attributes:
        causal: Whether the rule is for causal heads, which may keep a cache.
    """

    causal: ClassVar[bool] = True

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Return whether the rule computes every pair."""

    @property
    @abstractmethod
    def group(self) -> Hashable:
        """Return a key that all heads of a layer must agree in.

        Within a layer, only rules of one class and one group can be combined.
        """

    @property
    def family(self) -> str:
        """Return the name under which results of similar rules are shown together."""
        return type(self).__name__

    @abstractmethod
    def share(self, length: int) -> float:
        """Return the computed pairs as a share of ordinary attention at this text length."""

    def kept(self, length: int) -> float:
        """Return the share of the keys that an evicting cache keeps for a head.

        Args:
            length: Number of tokens of the text.
        """
        return 1.0

    def sharing(self, heads: int, key_heads: int) -> int:
        """Return how many query heads share one set of kept keys.

        The set is as large as the head that needs most requires.

        Args:
            heads: Number of query heads of the layer.
            key_heads: Number of its key heads.
        """
        return heads // key_heads

    @abstractmethod
    def exact(self) -> CandidateRule:
        """Return ordinary attention as a rule of this group."""

    @staticmethod
    @abstractmethod
    def layer_config(rules: Sequence[CandidateRule], length: int) -> MechanismConfig:
        """Return the mechanism config of one layer.

        Args:
            rules: One rule per head, or a single rule for all heads.
            length: Number of tokens that the rules were chosen for.
        """

    @staticmethod
    @abstractmethod
    def base_config() -> MechanismConfig:
        """Return a config of the mechanism without settings of a layer.

        `measure` patches it with gates at 0 to observe the calls of the original attention.
        """

    @staticmethod
    def compare(
        call: HostCall,
        rules: Sequence[CandidateRule],
        starts: Sequence[int],
        project: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Compare every rule with ordinary attention at R sampled queries.

        Args:
            call: A call of ordinary causal attention over a whole text.
            rules: Rules of one class.
            starts: First query of each of the R / `CHUNK` chunks.
            project: An affine map from outputs [H, R, dv] to [H, R].

        Yields:
            For every rule, `project` of the outputs under the rule, and
            KL(under the rule ‖ ordinary attention) in nats, both [H, R].
        """
        raise NotImplementedError("rules of this kind cannot be measured head by head")
