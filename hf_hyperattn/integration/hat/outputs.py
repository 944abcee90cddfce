"""What `HatModel` returns, and how what is seen on the way comes back to the places of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput

from ...mechanisms.hat.segments import Segments


@dataclass
class HatModelOutput(ModelOutput):
    """What `HatModel` returns, with N tokens in S segments of W places.

    Args:
        last_hidden_state: [B, N, width], in the places of the tokens that came in; 0 at padding.
        pooler_output: [B, width].
        segment_states: [B, S, width], the segments' CLS rows at the end.
        segment_mask: bool [B, S], whether the text has so many segments.
        hidden_states: the embeddings, and the states after each segment-wise block and the cross-segment blocks behind
            it, each [B, N, width]; where asked for.
        attentions: of each segment-wise block, [B, S, H, W, W]; where asked for.
        cross_segment_attentions: of each cross-segment block, [B, H, S, S]; where asked for.
    """

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    segment_states: Tensor | None = None
    segment_mask: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_segment_attentions: tuple[Tensor, ...] | None = None


class Seen:
    """What is returned beside the result: states and attention weights, in the places of the tokens."""

    def __init__(self, segments: Segments, states: bool, attentions: bool):
        self.segments, self.kept = segments, {}
        if states:
            self.kept["hidden_states"] = []
        if attentions:
            self.kept |= {"attentions": [], "cross_segment_attentions": []}

    def states(self, x: Tensor) -> None:
        if "hidden_states" in self.kept:
            self.kept["hidden_states"].append(self.segments.to_tokens(x))

    def within(self, weights: Tensor | None) -> None:
        if "attentions" in self.kept:
            present = self.segments.present[..., None, None, None]
            self.kept["attentions"].append(_there(weights)[self.segments.members] * present)

    def across(self, weights: Tensor | None) -> None:
        if "attentions" in self.kept:
            self.kept["cross_segment_attentions"].append(_there(weights))

    def found(self) -> dict[str, tuple]:
        return {name: tuple(values) for name, values in self.kept.items()}


def _there(weights: Tensor | None) -> Tensor:
    if weights is None:
        raise ValueError(
            "output_attentions=True needs an attention function that returns its weights; allowed: "
            "model.set_attn_implementation('eager')"
        )
    return weights
