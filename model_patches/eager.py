"""What the served families compute under `attn_implementation="eager"`, written once for all of them."""

from __future__ import annotations

import torch
from torch import nn


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the served families compute under `attn_implementation="eager"`.

    Args:
        module: the routed attention module; `training` and `upcast_scores` are read.
        query: `[B, H, Q, D]`. key, value: `[B, Hkv, K, D]`, `Hkv` divides `H`.
        attention_mask: None, bool (True = take part) or additive, broadcastable to `[B, H, Q, K]`. None with
            `is_causal` and `Q > 1` is causal from the top left, as in `scaled_dot_product_attention`.
        dropout: probability, applied to the weights when the module trains.
        scaling: factor of the dot product, `D ** -0.5` by default.
        is_causal: overrides `module.is_causal`.
        position_bias: added to the scaled product, `[B or 1, H, Q, K]`.

    Returns:
        Output `[B, Q, H, D]` in the value's dtype, and the weights `[B, H, Q, K]`.

    Raises:
        ValueError: `softcap`, `s_aux` or `sliding_window` was given; no served family has them.
    """
    refused = [
        name for name in ("softcap", "s_aux", "sliding_window") if kwargs.get(name) is not None
    ]
    if refused:
        raise ValueError(
            f"eager attention of {type(module).__name__} got {refused}, which no served family has"
        )
    scores = _scores(module, query, key, scaling)
    if position_bias is not None:
        scores = scores + position_bias
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    scores = _masked(scores, attention_mask, causal)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    groups = query.shape[1] // value.shape[1]
    output = torch.matmul(weights, value.repeat_interleave(groups, dim=1) if groups > 1 else value)
    return output.transpose(1, 2).contiguous(), weights


def eager_scores(module, query, key, mask: torch.Tensor | None) -> torch.Tensor:
    """Scores before the softmax, `[B, H, Q, K]`, scaled by `D ** -0.5` and masked; for families that return them."""
    return _masked(_scores(module, query, key, None), mask, causal=False)


def _scores(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
    if getattr(module, "upcast_scores", False):
        query, key = query.float(), key.float()
    return torch.matmul(query, key.transpose(-1, -2)) * (
        query.shape[-1] ** -0.5 if scaling is None else scaling
    )


def _masked(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    if mask is None and causal and scores.shape[-2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask
