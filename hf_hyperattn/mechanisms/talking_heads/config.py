"""The config of talking heads."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import MechanismConfig, option


@dataclass(frozen=True)
class TalkingHeadsConfig(MechanismConfig):
    """Talking-heads attention (arXiv 2003.02436).

    Heads mix their logits before the softmax and their weights after it.
    """

    mechanism = "talking_heads"

    before: bool = option(True, "mix logits before the softmax", symbol="P_l")
    after: bool = option(True, "mix weights after the softmax", symbol="P_w")

    def __post_init__(self):
        super().__post_init__()
        if not (self.before or self.after):
            raise ValueError(
                "TalkingHeadsConfig(before=False, after=False) mixes nothing; allowed: at least one of them True"
            )

    @property
    def breaks(self) -> frozenset[str]:
        """Properties that mixing removes for other mechanisms."""
        return frozenset({"logits_by_head"})

    @property
    def needs(self) -> dict[str, str]:
        """Properties that mixing relies on."""
        return {
            "pairwise_logits": "the logits are of three tokens, and those that would be mixed are of two",
            "any_weights": "mixed weights may be negative, which no midpoint has (aggregation='mean' takes them)",
        }
