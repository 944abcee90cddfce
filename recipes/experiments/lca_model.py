"""A small encoder that reads out the first token; all that varies is the score of its attention."""

from __future__ import annotations

from torch import Tensor, nn

from .scores import Scored


class Attention(nn.Module):
    """Self-attention in both directions, [B, L, width] to the same.

    Args:
        kind: a key of `scores.KINDS`.
        width: of the model, a multiple of `heads`.
        heads: number of heads.
    """

    def __init__(self, kind: str, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attend = Scored(kind, heads)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, width] to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Tokens [B, L] to logits [B, classes]: pre-norm blocks of attention and a GELU layer, read out at token 0."""

    def __init__(
        self,
        kind: str,
        vocabulary: int,
        length: int,
        classes: int,
        width: int,
        heads: int,
        layers: int,
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.blocks.append(
                nn.ModuleList([norms[0], Attention(kind, width, heads), norms[1], mlp])
            )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, ids: Tensor) -> Tensor:
        """Tokens, int64 [B, L], to logits [B, classes]."""
        x = self.tokens(ids) + self.places.weight
        for norm_a, attention, norm_m, mlp in self.blocks:
            x = x + attention(norm_a(x))
            x = x + mlp(norm_m(x))
        return self.head(x[:, 0])
