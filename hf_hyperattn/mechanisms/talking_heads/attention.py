"""Which way talking-heads attention is computed: dense where everything is small or weights are wanted, else blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...engines.dispatch import DENSE_ELEMENTS, checked
from ...engines.options import Options, full_precision
from ...engines.score import PairScore
from . import definition, operator

BACKENDS = ("auto", "reference", "blockwise")


def talking_heads(
    score: PairScore,
    value: Tensor,
    options: Options | None = None,
    *,
    before: Tensor | None,
    after: Tensor | None,
    backend: str = "auto",
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention whose heads mix their logits before the softmax and their weights after it.

    Args:
        score: the pair score, features [B, H, N, d] and [B, Hkv, M, d].
        value: [B, Hkv, M, dv].
        options: masks and the rest; None for none of them.
        before, after: P_l and P_w, [H, H]; None for the identity.
        backend: "reference" (dense), "blockwise", or "auto".
        weights: also return the mixed weights [B, H, N, M], which are dense.

    Returns:
        The output [B, H, N, dv] in the score's dtype (float32 or float64), and the weights or None.

    Raises:
        ValueError: an unknown backend, or weights from blocks.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown to talking heads, for which no fused kernel exists; allowed: "
            f"{', '.join(BACKENDS)}"
        )
    if weights and backend == "blockwise":
        raise ValueError("backend='blockwise' returns no weights; use backend='reference' or 'auto'")
    options = checked(options or Options(), score)
    dtype = score.dtype
    before, after = (None if m is None else m.to(dtype) for m in (before, after))
    dense = backend == "reference" or weights or (backend == "auto" and small(score))
    attend = definition.attend if dense else operator.attend
    with full_precision(score.device):
        out, found = attend(score, value, options, before, after)
    return out, found if weights else None


def small(score: PairScore) -> bool:
    """Whether the call has less to do densely than in blocks. Not asked while tracing: no guard on lengths."""
    return not torch.compiler.is_compiling() and math.prod(score.shape) <= DENSE_ELEMENTS
