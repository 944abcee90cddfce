"""Attention with the scores that experiments compare, as one module; those without geometry are controls."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_hyperattn import functional as ha


def distance_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    temperature: Tensor,
) -> Tensor:
    """softmax(-|q - k| / temperature)·v: what is left of hyperbolic distance without the curvature.

    Args:
        query, key, value: [B, H, L, d].
        attn_mask: bool, True where a pair takes part; broadcast to [B, H, L, M].
        temperature: [H].
    """
    distance = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
    return masked(-distance / temperature[:, None, None], attn_mask).softmax(-1) @ value


def normalised_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: Tensor,
    length: int | None = None,
) -> Tensor:
    """softmax(scale·log2(L² - L)·cos(q, k))·v: the normalised dot product and its first scale of arXiv 2010.04245.

    Args:
        query, key, value: [B, H, L, d].
        attn_mask: bool, True where a pair takes part; broadcast to [B, H, L, M].
        scale: [H], 1 at the start.
        length: L, nearly the longest of the training texts; None: that of the keys.
    """
    length = length or key.shape[-2]
    cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    logits = math.log2(length * length - length) * scale[:, None, None] * cosine
    return masked(logits, attn_mask).softmax(-1) @ value


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """-inf where the mask is False."""
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


#: For each kind of attention: its function, fixed settings, and settings learned per head from 1 on. The second and
#: third are the controls of the others: attention with a bounded score, and with a distance, but without geometry.
KINDS: dict[str, tuple[Callable, dict, tuple[str, ...]]] = {
    "dot product": (F.scaled_dot_product_attention, {}, ()),
    "normalised dot product": (normalised_attention, {}, ("scale",)),
    "Euclidean distance": (distance_attention, {}, ("temperature",)),
    "hyperbolic distance": (ha.hyperbolic_attention, {}, ("curvature", "temperature")),
    "umbral cone, xi": (ha.cone_attention, {"variant": "umbral"}, ("gamma", "radius")),
    "umbral cone, psi": (
        ha.cone_attention,
        {"variant": "umbral", "mapping": "psi"},
        ("gamma", "radius"),
    ),
    "penumbral cone, psi": (ha.cone_attention, {"variant": "penumbral"}, ("gamma", "radius")),
}


class Scored(nn.Module):
    """Attention of one kind, its settings learned per head.

    Args:
        kind: a key of `KINDS`.
        heads: number of heads.
        backend: of the functions of this package; "reference" is the fastest for sequences of a few tokens.
        **fixed: further settings of the kind's function.
    """

    def __init__(self, kind: str, heads: int, backend: str = "reference", **fixed):
        super().__init__()
        self.attend, settings, learned = KINDS[kind]
        self.fixed = settings | fixed
        if self.attend in (ha.cone_attention, ha.hyperbolic_attention):
            self.fixed["backend"] = backend
        self.logs = nn.ParameterDict({n: nn.Parameter(torch.zeros(heads)) for n in learned})

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """[B, H, L, d] each; a bool mask, True where a pair takes part."""
        learned = {name: log.exp() for name, log in self.logs.items()}
        return self.attend(query, key, value, attn_mask=mask, **self.fixed, **learned)
