"""What injection knows of a sparse rule. A rule of one's own is a frozen dataclass that has the methods below."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import ClassVar

from torch import Tensor

from ..config import MechanismConfig
from ..mechanisms.base import HostCall

#: Queries that are measured side by side.
CHUNK = 16


class CandidateRule(ABC):
    """Which pairs of one head are computed, and what stands for the others."""

    #: Whether it is of heads whose queries see the tokens before them alone, and which may keep a cache.
    causal: ClassVar[bool] = True

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Whether every pair is computed."""

    @property
    @abstractmethod
    def group(self) -> Hashable:
        """The heads of one layer take rules of one class that agree in this."""

    @property
    def family(self) -> str:
        """The rules that a rival would have to choose from, by what people call them."""
        return type(self).__name__

    @abstractmethod
    def share(self, length: int) -> float:
        """Pairs computed, in proportion to those of ordinary attention over a text of `length` tokens."""

    def kept(self, length: int) -> float:
        """Keys that a cache which forgets keeps for a head after `length` tokens, in proportion to these."""
        return 1.0

    def sharing(self, heads: int, key_heads: int) -> int:
        """How many query heads of a layer share what is kept, each of which needs what any of them needs."""
        return heads // key_heads

    @abstractmethod
    def exact(self) -> CandidateRule:
        """Ordinary attention, as a rule of this group."""

    @staticmethod
    @abstractmethod
    def layer_config(rules: Sequence[CandidateRule], length: int) -> MechanismConfig:
        """The config of a layer whose heads have these rules (one rule: all of them), tuned for `length` tokens."""

    @staticmethod
    @abstractmethod
    def base_config() -> MechanismConfig:
        """The mechanism without settings of a layer; `measure` patches it, gates at 0, to see calls of attention."""

    @staticmethod
    def compare(
        call: HostCall,
        rules: Sequence[CandidateRule],
        starts: Sequence[int],
        project: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For every rule, what it makes of a call, at R sampled queries.

        Args:
            call: ordinary causal attention over a whole text.
            starts: the R / `CHUNK` first queries of chunks of `CHUNK`.
            project: an affine map of outputs [H, R, dv] to [H, R].

        Yields:
            `project` of the outputs under the rule, and KL(under the rule ‖ ordinary attention) in nats, both [H, R].
        """
        raise NotImplementedError("rules of this kind cannot be measured head by head")
