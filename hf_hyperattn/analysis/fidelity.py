"""How far two models' outputs are apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.inference_mode()
def next_token_logits(model: torch.nn.Module, ids: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Logits `[N, vocabulary]` of a causal LM on token ids `[N]`: float32, on the CPU, in evaluation mode."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        tokens = torch.as_tensor(ids, dtype=torch.long, device=device).flatten()
        return model(tokens[None], use_cache=False).logits[0].float().cpu()
    finally:
        model.train(was_training)


def max_logit_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference of two tensors of one shape; nan where either holds nan."""
    if a.shape != b.shape:
        raise ValueError(f"logits of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
    return (a.double() - b.double()).abs().max().item()
