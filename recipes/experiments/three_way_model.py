"""A small reader of tokens whose attention is three-way or pairwise."""

from __future__ import annotations

from torch import Tensor, nn

from hf_hyperattn.functional import trilinear_attention


class Reader(nn.Module):
    """Tokens to two logits each: embedding, layers, a linear map. No positions: the task has none.

    Args:
        tokens: size of the vocabulary.
        three_way: attend to pairs of tokens; the second keys and values have projections of their own.
        width, heads, head_width, layers: sizes.
    """

    def __init__(
        self, tokens: int, three_way: bool, width: int, heads: int, head_width: int, layers: int
    ):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            Layer(three_way, width, heads, head_width) for _ in range(layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, L] integers to [B, L, 2]."""
        states = self.embedding(tokens)
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


class Layer(nn.Module):
    """Attention and a network of one hidden layer, each beside the states and after a layer norm."""

    def __init__(self, three_way: bool, width: int, heads: int, head_width: int):
        super().__init__()
        self.three_way, self.heads = three_way, heads
        self.project = nn.Linear(width, (5 if three_way else 3) * heads * head_width, bias=False)
        self.join = nn.Linear(heads * head_width, width, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.network = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, states: Tensor) -> Tensor:
        """[B, L, width] to the same."""
        first, second = self.norms
        parts = self.project(first(states)).unflatten(
            -1, (-1, self.heads, self.join.in_features // self.heads)
        )
        parts = parts.permute(2, 0, 3, 1, 4)
        attend = (
            trilinear_attention if self.three_way else nn.functional.scaled_dot_product_attention
        )
        states = states + self.join(attend(*parts).transpose(1, 2).flatten(2))
        return states + self.network(second(states))
