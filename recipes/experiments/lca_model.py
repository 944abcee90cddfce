"""A small encoder that reads out the first token; all that varies is the score of its attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_hyperattn import functional as ha


def distance_attention(query: Tensor, key: Tensor, value: Tensor, *, temperature: Tensor) -> Tensor:
    """softmax(-|q - k| / temperature)·v: what is left of hyperbolic distance without the curvature.

    Args:
        query, key, value: [B, H, L, d].
        temperature: [H].
    """
    squared = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
    distance = squared.clamp_min(1e-12).sqrt()
    return (-distance / temperature[:, None, None]).softmax(-1) @ value


def normalised_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: Tensor) -> Tensor:
    """softmax(scale·log2(L² - L)·cos(q, k))·v: the normalised dot product and its first scale of arXiv 2010.04245.

    Args:
        query, key, value: [B, H, L, d].
        scale: [H], 1 at the start.
    """
    length = key.shape[-2]
    cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    return (math.log2(length * length - length) * scale[:, None, None] * cosine).softmax(-1) @ value


#: For each kind of attention: its function, fixed settings, and settings learned per head from 1 on. The second and
#: third are the controls of the others: attention with a bounded score, and with a distance, but without geometry.
KINDS: dict[str, tuple[Callable, dict, tuple[str, ...]]] = {
    "dot product": (F.scaled_dot_product_attention, {}, ()),
    "normalised dot product": (normalised_attention, {}, ("scale",)),
    "Euclidean distance": (distance_attention, {}, ("temperature",)),
    "hyperbolic distance": (ha.hyperbolic_attention, {}, ("curvature", "temperature")),
    "umbral cone, xi": (ha.cone_attention, {"variant": "umbral"}, ("gamma", "radius")),
    "umbral cone, psi": (ha.cone_attention, {"variant": "umbral", "mapping": "psi"}, ("gamma", "radius")),
    "penumbral cone, psi": (ha.cone_attention, {"variant": "penumbral"}, ("gamma", "radius")),
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
        self.attend, self.fixed, learned = KINDS[kind]
        if self.attend in (ha.cone_attention, ha.hyperbolic_attention):
            self.fixed = self.fixed | {"backend": "reference"}  # the fastest for sequences of eight tokens
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
