"""A small encoder that reads out the first token; all that varies is the score of its attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_hyperattn import functional as ha

#: For each kind of attention: its function, fixed settings, and settings learned per head from 1 on.
KINDS: dict[str, tuple[str | None, dict, tuple[str, ...]]] = {
    "dot product": (None, {}, ()),
    "cone umbral": ("cone_attention", {"variant": "umbral"}, ("gamma", "radius")),
    "cone penumbral": ("cone_attention", {"variant": "penumbral"}, ("gamma", "radius")),
    "hyperbolic": ("hyperbolic_attention", {}, ("curvature", "temperature")),
}


class Attention(nn.Module):
    """Self-attention in both directions, [B, L, width] to the same.

    Args:
        kind: a key of `KINDS`.
        width: of the model, a multiple of `heads`.
        heads: number of heads.
    """

    def __init__(self, kind: str, width: int, heads: int):
        super().__init__()
        self.heads = heads
        name, self.fixed, learned = KINDS[kind]
        self.attend: Callable = getattr(ha, name) if name else F.scaled_dot_product_attention
        # Sequences of eight tokens: the dense engine is the fastest.
        self.fixed = self.fixed | ({"backend": "reference"} if name else {})
        self.logs = nn.ParameterDict({n: nn.Parameter(torch.zeros(heads)) for n in learned})
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, width] to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        learned = {name: log.exp() for name, log in self.logs.items()}
        return self.out(self.attend(q, k, v, **self.fixed, **learned).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Tokens [B, L] to logits [B, classes]: pre-norm blocks of attention and a GELU layer, read out at token 0."""

    def __init__(
        self, kind: str, vocabulary: int, length: int, classes: int, width: int, heads: int, layers: int
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.blocks.append(nn.ModuleList([norms[0], Attention(kind, width, heads), norms[1], mlp]))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, ids: Tensor) -> Tensor:
        """Tokens, int64 [B, L], to logits [B, classes]."""
        x = self.tokens(ids) + self.places.weight
        for norm_a, attention, norm_m, mlp in self.blocks:
            x = x + attention(norm_a(x))
            x = x + mlp(norm_m(x))
        return self.head(x[:, 0])
