"""Second moments of what projections read, from calls of the model.

For keys those of differences from a sequence's mean: what all keys of a row share, softmax does not see. Padded tokens
do not count where the call says which they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Moments = tuple[Tensor, Tensor]


class InputMoment:
    """A forward pre-hook that sums over the inputs of one projection.

    Args:
        centred: whether differences from each sequence's mean are what counts.
    """

    def __init__(self, centred: bool):
        self.centred, self.total, self.tokens = centred, torch.zeros(()), 0.0
        self.mask: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple) -> None:
        x = args[0].detach().double()
        x = x.flatten(0, -3) if x.dim() > 3 else x
        mask, shape = self.mask, x.shape[:-1]
        keep = (x.new_ones(shape) if mask is None or mask.shape != shape else mask.to(x))[..., None]
        if self.centred:
            x = x - (x * keep).sum(-2, keepdim=True) / keep.sum(-2, keepdim=True).clamp_min(1)
        rows = (x * keep).flatten(0, -2)
        self.total, self.tokens = self.total.to(x) + rows.mT @ rows, self.tokens + float(keep.sum())

    @property
    def moment(self) -> Tensor:
        """[D, D], float64, on the CPU."""
        return (self.total / self.tokens).cpu()


@torch.no_grad()
def moments_of(model: PreTrainedModel, parts: list, examples: Iterable[Mapping]) -> list[Moments]:
    """For each part the moments of what its queries and its keys are made from.

    Raises:
        ValueError: a host that no example reaches.
    """
    pairs = [(InputMoment(centred=False), InputMoment(centred=True)) for _ in parts]
    with ExitStack() as stack:
        for part, pair in zip(parts, pairs, strict=True):
            children = list(part.projections.children.values())
            for module, moment in zip(children if len(children) > 1 else children * 2, pair, strict=True):
                stack.callback(module.register_forward_pre_hook(moment).remove)
        stack.callback(model.train, model.training)
        model.eval()
        for call in examples:
            inputs = {n: v.to(model.device) if isinstance(v, Tensor) else v for n, v in call.items()}
            mask = inputs.get("attention_mask")
            for moment in (m for pair in pairs for m in pair):
                moment.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
            model(**inputs)
    for part, pair in zip(parts, pairs, strict=True):
        if not all(moment.tokens for moment in pair):
            raise ValueError(f"no example reaches {part.host.name}; allowed: calls that run every converted host")
    return [(query.moment, key.moment) for query, key in pairs]
