"""The projections of queries and keys inside a host: where they are, and the shared ones that take their place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

#: Names of the two projections in hosts that have one each, the query's first.
PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("q", "k"))
#: The one projection for queries, keys and values in GPT-2's layout.
FUSED = "c_attn"


@dataclass(frozen=True)
class Found:
    """The projections of a host.

    Args:
        children: the modules that hold them, by their names in the host.
        query, key: weights [H·d, D] and [H·d, D'], views of the parameters.
        query_bias, key_bias: [H·d], or None.
    """

    children: dict[str, nn.Module]
    query: Tensor
    key: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None


def projections(host: nn.Module) -> Found | None:
    """The projections of a host, None where they are not of a kind that can be shared."""
    for names in PAIRS:
        pair = [host._modules.get(name) for name in names]
        if all(type(module) is nn.Linear for module in pair):
            query, key = pair
            return Found(dict(zip(names, pair)), query.weight, key.weight, query.bias, key.bias)
    fused = host._modules.get(FUSED)
    if type(fused) is Conv1D and fused.nf == 3 * fused.nx:
        query, key, _ = fused.weight.mT.chunk(3)
        biases = fused.bias.chunk(3)
        return Found({FUSED: fused}, query, key, biases[0], biases[1])
    return None


class SharedProjection(nn.Module):
    """What all heads share of their queries, or of their keys: rows of R numbers, and what keys add to each head.

    The rows are filled up with zeros to the width that the host reshapes and caches.

    Args:
        inputs: features of the hidden states, D.
        rank: shared dimensions, R.
        width: of the rows that the host expects, H·d.
        bias: whether the shared dimensions have a bias.
        heads: of which the keys carry the content bias, 0 for none.
    """

    added_by_conversion = True  # a load checks that its tensors are there

    def __init__(self, inputs: int, rank: int, width: int, bias: bool = False, heads: int = 0):
        super().__init__()
        self.width = width
        self.shared = nn.Linear(inputs, rank, bias=bias)
        self.content = nn.Linear(inputs, heads, bias=False) if heads else None

    @property
    def weight(self) -> nn.Parameter:
        """The shared weight, which some families initialise by this name."""
        return self.shared.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H·d]: R shared numbers, those of the content bias, zeros."""
        rows = self.shared(hidden)
        if self.content is not None:
            rows = torch.cat([rows, self.content(hidden)], -1)
        return pad(rows, (0, self.width - rows.shape[-1]))

    def extra_repr(self) -> str:
        return f"width={self.width}"


class FusedProjection(nn.Module):
    """Shared queries and keys, and the values as they were, side by side: for hosts with one projection for all."""

    def __init__(self, query: SharedProjection, key: SharedProjection, value: Conv1D):
        super().__init__()
        self.query, self.key, self.value = query, key, value

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., 3·H·d]."""
        return torch.cat([self.query(hidden), self.key(hidden), self.value(hidden)], -1)


@dataclass(frozen=True)
class Shape:
    """Which shared projections a host gets.

    Args:
        rank: R. width: H·d. heads: H.
        bias: whether the shared queries keep a bias, as they do at full rank.
        content: whether keys carry the content bias, as they do below full rank where queries had a bias.
    """

    rank: int
    width: int
    heads: int
    bias: bool
    content: bool

    @classmethod
    def of(cls, found: Found, rank: int, heads: int) -> Shape:
        """The shape for a host's projections and a rank that `check_room` allows."""
        width, biased = found.query.shape[0], found.query_bias is not None
        return cls(rank, width, heads, biased and rank == width, biased and rank < width)


def shared_modules(found: Found, shape: Shape) -> dict[str, nn.Module]:
    """New modules by the names of those that they replace, with weights that are to be filled; values are copied."""
    sizes, biased = (shape.rank, shape.width), shape.bias
    with torch.device(found.query.device):
        query = SharedProjection(found.query.shape[1], *sizes, biased)
        key = SharedProjection(found.key.shape[1], *sizes, heads=shape.heads if shape.content else 0)
        modules = dict(zip(found.children, (query, key)))
        if FUSED in found.children:
            value = values_alone(found.children[FUSED])
            modules = {FUSED: FusedProjection(query, key, value)}
    for name, module in modules.items():
        module.train(found.children[name].training)
        if any(p.dtype != found.query.dtype for p in module.parameters()):  # `to` fails under FakeTensorMode
            module.to(found.query.dtype)
    return modules


def values_alone(fused: Conv1D) -> Conv1D:
    """The part of a projection for queries, keys and values that makes the values."""
    width = fused.nf // 3
    value = Conv1D(width, fused.nx)
    with torch.no_grad():
        value.weight.copy_(fused.weight[:, 2 * width :])
        value.bias.copy_(fused.bias[2 * width :])
    return value


def shared_pair(modules: dict[str, nn.Module]) -> tuple[SharedProjection, SharedProjection]:
    """The shared queries and keys out of what `shared_modules` made, or what a converted host holds."""
    if FUSED in modules:
        return modules[FUSED].query, modules[FUSED].key
    query, key = modules.values()
    return query, key
