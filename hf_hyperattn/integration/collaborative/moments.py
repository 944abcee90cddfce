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

from .projections import FUSED

Moments = tuple[Tensor, Tensor]


class Reader:
    """Sums over the inputs of one projection.

    Args:
        centred: whether differences from each sequence's mean are what counts.
    """

    def __init__(self, centred: bool):
        self.centred, self.total, self.tokens, self.mask = centred, 0.0, 0, None

    def __call__(self, module: nn.Module, args: tuple) -> None:
        """A forward pre-hook."""
        x = args[0].detach().double()
        x = x.flatten(0, -3) if x.dim() > 3 else x
        keep = (
            self.mask
            if self.mask is not None and self.mask.shape == x.shape[:-1]
            else x.new_ones(x.shape[:-1])
        )
        keep = keep.to(x)[..., None]
        if self.centred:
            x = x - (x * keep).sum(-2, keepdim=True) / keep.sum(-2, keepdim=True).clamp_min(1)
        rows = (x * keep).flatten(0, -2)
        self.total, self.tokens = self.total + rows.mT @ rows, self.tokens + float(keep.sum())

    @property
    def moment(self) -> Tensor:
        """[D, D], float64, on the CPU."""
        return (self.total / self.tokens).cpu()


def moments_of(model: PreTrainedModel, parts: list, examples: Iterable[Mapping]) -> list[Moments]:
    """For each part the moments of what its queries and its keys are made from.

    Raises:
        ValueError: a host that no example reaches.
    """
    readers, training = [], model.training
    with ExitStack() as stack:
        for part in parts:
            children = part.found.children
            ends = [children[FUSED]] * 2 if FUSED in children else list(children.values())
            pair = Reader(centred=False), Reader(centred=True)
            readers.append(pair)
            for end, reader in zip(ends, pair):
                stack.callback(end.register_forward_pre_hook(reader).remove)
        stack.callback(model.train, training)
        model.eval()
        for call in examples:
            read(model, call, [reader for pair in readers for reader in pair])
    for part, pair in zip(parts, readers, strict=True):
        if not all(reader.tokens for reader in pair):
            raise ValueError(
                f"no example reaches {part.host.name}; allowed: calls that run every converted host"
            )
    return [(query.moment, key.moment) for query, key in readers]


@torch.no_grad()
def read(model: PreTrainedModel, call: Mapping, readers: list[Reader]) -> None:
    """Run the model on one call."""
    inputs = {n: v.to(model.device) if isinstance(v, Tensor) else v for n, v in call.items()}
    mask = inputs.get("attention_mask")
    for reader in readers:
        reader.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    model(**inputs)
