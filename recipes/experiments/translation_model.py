"""The model of the translation experiment: an encoder and a decoder, with queries and keys of any width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .scores import Scored

PAD, BEGIN, END = 0, 1, 2
SPECIAL = 3


class Attention(nn.Module):
    """Attention of one kind from x [B, L, width] to y [B, M, width].

    Args:
        kind: a key of `scores.KINDS`.
        width: of the model, a multiple of `heads`.
        heads: number of heads; values have width / heads numbers each.
        query_width: numbers of a query or key of one head.
        longest: of the training texts, which the normalised dot product asks for.
    """

    def __init__(self, kind: str, width: int, heads: int, query_width: int, longest: int):
        super().__init__()
        self.heads = heads
        fixed = {"length": longest} if kind == "normalised dot product" else {}
        self.attend = Scored(kind, heads, **fixed)
        self.query, self.key = (nn.Linear(width, heads * query_width) for _ in range(2))
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """[B, L, width]; mask bool, True where a pair takes part, broadcast to [B, heads, L, M]."""
        q, k, v = (
            part(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, rows in ((self.query, x), (self.key, y), (self.value, y))
        )
        mask = mask.expand(*q.shape[:3], k.shape[2])
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm block: attention to itself, with `crossed` to the source too, and a GELU layer."""

    def __init__(self, crossed: bool, width: int, dropout: float, make):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.own, self.cross = make(), make() if crossed else None
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if crossed else 2))

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ):
        """[B, L, width] to the same."""
        rows = self.norms[0](x)
        x = x + self.dropout(self.own(rows, rows, mask))
        if self.cross is not None:
            x = x + self.dropout(self.cross(self.norms[1](x), source, source_mask))
        return x + self.dropout(self.mlp(self.norms[-1](x)))


class Translator(nn.Module):
    """Source and target tokens to logits of the next target token; one table of tokens, read and written with.

    Args:
        kind: of all its attention, a key of `scores.KINDS`.
        query_width: numbers of a query or key of one head.
        vocabulary: number of tokens of both languages together.
        settings: width, heads, layers, dropout and longest.
    """

    def __init__(self, kind: str, query_width: int, vocabulary: int, settings: dict):
        super().__init__()
        width, heads, dropout = settings["width"], settings["heads"], settings["dropout"]
        longest = settings["longest"]
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest + 1, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        nn.init.normal_(self.places.weight, std=0.1)
        self.dropout = nn.Dropout(dropout)
        make = lambda: Attention(kind, width, heads, query_width, longest)
        layers = range(settings["layers"])
        self.encoder = nn.ModuleList(Block(False, width, dropout, make) for _ in layers)
        self.decoder = nn.ModuleList(Block(True, width, dropout, make) for _ in layers)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def embedded(self, ids: Tensor) -> Tensor:
        """Tokens [B, L] to rows [B, L, width]."""
        rows = self.tokens(ids) * self.tokens.embedding_dim**0.5
        return self.dropout(rows + self.places.weight[: ids.shape[1]])

    def encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Source tokens [B, L] to rows [B, L, width] and a mask [B, 1, 1, L]."""
        mask, x = (ids != PAD)[:, None, None], self.embedded(ids)
        for block in self.encoder:
            x = block(x, mask)
        return self.norms[0](x), mask

    def decode(self, ids: Tensor, source: Tensor, source_mask: Tensor) -> Tensor:
        """Target tokens [B, L], led by BEGIN, to logits [B, L, vocabulary]; padding is at the end."""
        length, x = ids.shape[1], self.embedded(ids)
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]
        for block in self.decoder:
            x = block(x, mask, source, source_mask)
        return F.linear(self.norms[1](x), self.tokens.weight)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Tokens [B, L] and [B, M] to logits [B, M, vocabulary]."""
        return self.decode(target, *self.encode(source))

    @torch.no_grad()
    def greedy(self, source: Tensor, most: int) -> Tensor:
        """The likeliest next token again and again, at most so many: tokens [B, M] without BEGIN."""
        rows, mask = self.encode(source)
        ids = torch.full((len(source), 1), BEGIN, device=source.device)
        ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        while ids.shape[1] <= most and not ended.all():
            following = self.decode(ids, rows, mask)[:, -1].argmax(-1).masked_fill(ended, PAD)
            ids = torch.cat([ids, following[:, None]], 1)
            ended |= following == END
        return ids[:, 1:]
