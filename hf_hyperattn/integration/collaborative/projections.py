"""The projections of queries and keys inside a host: where they are, the shared ones that take their place, and a
converted model that is built to be loaded with these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...mechanisms.collaborative.config import CollaborativeConfig
from ...mechanisms.collaborative.layer import SharedLayer
from ..checkpoint_config import inner, patched_hosts
from ..conversions import REBUILDERS

#: Names of the two projections in hosts that have one each, the query's first.
PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("q", "k"))
#: The one projection for queries, keys and values in GPT-2's layout.
FUSED = "c_attn"


@dataclass(frozen=True)
class Projections:
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

    def shared(self, rank: int, heads: int) -> SharedShape:
        """The shared ones for a rank that is allowed."""
        return SharedShape(rank, self.query.shape[0], heads, self.query_bias is not None)


def projections(host: nn.Module) -> Projections | None:
    """The projections of a host, None where they are not of a kind that can be shared."""
    for names in PAIRS:
        query, key = (host._modules.get(name) for name in names)
        if type(query) is nn.Linear and type(key) is nn.Linear:
            return Projections(
                dict(zip(names, (query, key))), query.weight, key.weight, query.bias, key.bias
            )
    fused = host._modules.get(FUSED)
    if type(fused) is Conv1D and fused.nf == 3 * fused.nx:
        (query, key, _), (query_bias, key_bias, _) = fused.weight.mT.chunk(3), fused.bias.chunk(3)
        return Projections({FUSED: fused}, query, key, query_bias, key_bias)
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
    def weight(self) -> Tensor:
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
    """Shared queries and keys, and the values as they were, side by side, [..., 3·H·d]; `fused` is copied from."""

    def __init__(self, query: SharedProjection, key: SharedProjection, fused: Any):
        super().__init__()
        width = fused.nf // 3
        self.query, self.key, self.value = query, key, Conv1D(width, fused.nx)
        with torch.no_grad():
            self.value.weight.copy_(fused.weight[:, 2 * width :])
            self.value.bias.copy_(fused.bias[2 * width :])

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([self.query(hidden), self.key(hidden), self.value(hidden)], -1)


@dataclass(frozen=True)
class SharedShape:
    """Which shared projections a host gets.

    Args:
        rank: R. width: H·d. heads: H.
        biased: whether the queries had a bias: at full rank the shared ones keep it, below that it becomes the content
            bias, which keys carry.
    """

    rank: int
    width: int
    heads: int
    biased: bool

    @property
    def bias(self) -> bool:
        return self.biased and self.rank == self.width

    @property
    def content(self) -> bool:
        return self.biased and self.rank < self.width


def shared_modules(old: Projections, shape: SharedShape) -> dict[str, nn.Module]:
    """New modules by the names of those that they replace, with weights that are to be filled; values are copied."""
    sizes, dtype = (shape.rank, shape.width), old.query.dtype
    with torch.device(old.query.device):
        query = SharedProjection(old.query.shape[1], *sizes, shape.bias)
        key = SharedProjection(old.key.shape[1], *sizes, heads=shape.heads if shape.content else 0)
        modules: dict[str, nn.Module] = dict(zip(old.children, (query, key)))
        if FUSED in old.children:
            modules = {FUSED: FusedProjection(query, key, old.children[FUSED])}
    for name, module in modules.items():
        module.train(old.children[name].training)
        if any(p.dtype != dtype for p in module.parameters()):  # `to` fails under FakeTensorMode
            module.to(dtype)
    return modules


def shared_layer(host: Any) -> SharedLayer | None:
    """The layer of a converted host."""
    layer = getattr(inner(host.hyper), CollaborativeConfig.mechanism, None)
    return layer if isinstance(layer, SharedLayer) else None


def is_shared(model: PreTrainedModel) -> bool:
    """Whether some host of the model is converted."""
    return any(shared_layer(host) is not None for _, host in patched_hosts(model))


def rebuild(model: PreTrainedModel) -> None:
    """Shared projections in every host whose `hyper` says so, for weights that are loaded next.

    Raises:
        ValueError: a host has no projections that can be shared.
    """
    for name, host in patched_hosts(model):
        layer = shared_layer(host)
        if layer is None:
            continue
        old = projections(host)
        if old is None:
            raise ValueError(
                f"config.hyperattn says that {name} was converted, and it has no projections that can be shared; "
                "allowed: the config that was saved with the model"
            )
        for child, module in shared_modules(old, old.shared(*layer.mixing.shape[::-1])).items():
            setattr(host, child, module)


REBUILDERS[CollaborativeConfig.mechanism] = rebuild
