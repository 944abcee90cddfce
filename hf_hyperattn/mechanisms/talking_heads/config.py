"""Configuration of talking heads."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import MechanismConfig, option


@dataclass(frozen=True)
class TalkingHeadsConfig(MechanismConfig):
    """Talking-heads attention (arXiv 2003.02436): heads mix their logits before softmax and their weights after it."""

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
    def refuses(self) -> dict[str, str]:
        return {
            "hsa": "tied logits stand for blocks of keys, which are others in every head and cannot be mixed"
        }
