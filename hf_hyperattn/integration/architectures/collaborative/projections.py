"""Query and key projections of attention layers, and the shared ones that replace them.

`rebuild_projections` puts shared projections into a model that is built to load a converted
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ....mechanisms.collaborative.config import CollaborativeConfig
from ....mechanisms.collaborative.layer import SharedLayer
from ...attention.hyper import patched_hosts, unwrap_hyper
from ...patching.conversions import REBUILDERS

#: Names of separate query and key projections.
PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("q", "k"))
#: Name of the one projection for queries, keys and values in GPT-2's layout.
FUSED = "c_attn"


@dataclass(frozen=True)
class Projections:
    """The projections of an attention layer.

    Args:
        children: The modules that contain them, by their names in the attention layer.
        query: Weight [H·d, D], a view of the parameter.
        key: Weight [H·d, D'], a view of the parameter.
        query_bias: Bias [H·d], or None.
        key_bias: Bias [H·d], or None.
    """

    children: dict[str, nn.Module]
    query: Tensor
    key: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None

    def plan_shared(self, rank: int, heads: int) -> SharedShape:
        """Return the shape of shared projections for a valid rank."""
        return SharedShape(
            rank=rank,
            width=self.query.shape[0],
            heads=heads,
            biased=self.query_bias is not None,
        )


def find_projections(host: nn.Module) -> Projections | None:
    """Return the projections of an attention layer, or None if they cannot be shared."""
    for names in PAIRS:
        query, key = (host._modules.get(name) for name in names)
        # Exactly `nn.Linear`: subclasses, such as quantised layers, compute something else.
        if type(query) is nn.Linear and type(key) is nn.Linear:
            return Projections(
                children=dict(zip(names, (query, key))),
                query=query.weight,
                key=key.weight,
                query_bias=query.bias,
                key_bias=key.bias,
            )
    fused = host._modules.get(FUSED)
    if type(fused) is Conv1D and fused.nf == 3 * fused.nx:
        # `Conv1D` stores its weight as [inputs, outputs].
        query, key, _ = fused.weight.mT.chunk(3)
        query_bias, key_bias, _ = fused.bias.chunk(3)
        return Projections(
            children={FUSED: fused},
            query=query,
            key=key,
            query_bias=query_bias,
            key_bias=key_bias,
        )
    return None


class SharedProjection(nn.Module):
    """A projection of queries, or of keys, to R dimensions that all heads share.

    Its output rows are filled with zeros to the width that the attention layer expects. So they
    pass through its reshaping and its cache.

    Args:
        inputs: Features of the hidden states, D.
        rank: Shared dimensions, R.
        width: Width of the rows that the attention layer expects, H·d.
        bias: Whether the shared dimensions have a bias.
        heads: Number of heads whose content bias the rows contain. Default: no content bias.
    """

    # `record_check.added_tensors` reads it, so that a load checks for these tensors.
    added_by_conversion = True

    def __init__(self, inputs: int, rank: int, width: int, bias: bool = False, heads: int = 0):
        super().__init__()
        self.width = width
        self.shared = nn.Linear(inputs, rank, bias=bias)
        self.content = nn.Linear(inputs, heads, bias=False) if heads else None

    @property
    def weight(self) -> Tensor:
        """The shared weight. Some families initialise projections by this name."""
        return self.shared.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return rows [..., H·d]: R shared numbers, content biases, then zeros."""
        rows = self.shared(hidden)
        if self.content is not None:
            rows = torch.cat([rows, self.content(hidden)], -1)
        return pad(rows, (0, self.width - rows.shape[-1]))

    def extra_repr(self) -> str:
        return f"width={self.width}"


class FusedProjection(nn.Module):
    """Shared queries and keys, and the original values, in one output [..., 3·H·d].

    Args:
        query: Shared projection of queries.
        key: Shared projection of keys.
        fused: The original projection, whose value part is copied.
    """

    def __init__(self, query: SharedProjection, key: SharedProjection, fused: Any):
        super().__init__()
        width = fused.nf // 3
        self.query = query
        self.key = key
        self.value = Conv1D(width, fused.nx)
        with torch.no_grad():
            self.value.weight.copy_(fused.weight[:, 2 * width :])
            self.value.bias.copy_(fused.bias[2 * width :])

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([self.query(hidden), self.key(hidden), self.value(hidden)], -1)


@dataclass(frozen=True)
class SharedShape:
    """Sizes of the shared projections of an attention layer.

    Args:
        rank: Shared dimensions, R.
        width: Width of the original projections, H·d.
        heads: Number of heads, H.
        biased: Whether the original queries have a bias. At full rank the shared queries keep it.
            Below that, it becomes the content bias, which the keys carry.
    """

    rank: int
    width: int
    heads: int
    biased: bool

    @property
    def bias(self) -> bool:
        """Whether the shared queries have a bias."""
        return self.biased and self.rank == self.width

    @property
    def content(self) -> bool:
        """Whether the keys carry a content bias."""
        return self.biased and self.rank < self.width


def build_shared(old: Projections, shape: SharedShape) -> dict[str, nn.Module]:
    """Return new modules, by the names of the modules that they replace.

    Weights of shared queries and keys are not set yet. Values are copied.

    Args:
        old: The original projections.
        shape: Sizes of the shared ones.
    """
    sizes, dtype = (shape.rank, shape.width), old.query.dtype
    # There at once: a model that is built for loading is on the meta device, without weights.
    with torch.device(old.query.device):
        query = SharedProjection(old.query.shape[1], *sizes, shape.bias)
        key = SharedProjection(old.key.shape[1], *sizes, heads=shape.heads if shape.content else 0)
        modules: dict[str, nn.Module] = dict(zip(old.children, (query, key)))
        if FUSED in old.children:
            modules = {FUSED: FusedProjection(query, key, old.children[FUSED])}
    for name, module in modules.items():
        module.train(old.children[name].training)
        # `to` fails under FakeTensorMode, so call it only if it is needed.
        if any(p.dtype != dtype for p in module.parameters()):
            module.to(dtype)
    return modules


def find_shared_layer(host: Any) -> SharedLayer | None:
    """Return the mechanism's layer of a converted attention layer, or None."""
    layer = getattr(unwrap_hyper(host.hyper), CollaborativeConfig.mechanism, None)
    return layer if isinstance(layer, SharedLayer) else None


def is_shared(model: PreTrainedModel) -> bool:
    """Return whether an attention layer of the model is converted."""
    return any(find_shared_layer(host) is not None for _, host in patched_hosts(model))


def rebuild_projections(model: PreTrainedModel) -> None:
    """Put shared projections into a model before converted weights are loaded.

    Args:
        model: A patched model. A `SharedLayer` in a `hyper` marks a converted attention layer.

    Raises:
        ValueError: Such an attention layer has no projections that can be shared.
    """
    for name, host in patched_hosts(model):
        layer = find_shared_layer(host)
        if layer is None:
            continue
        old = find_projections(host)
        if old is None:
            raise ValueError(
                f"config.hyperattn says that {name} was converted, and it has no projections that can be shared; "
                "allowed: the config that was saved with the model"
            )
        heads, rank = layer.mixing.shape
        for child, module in build_shared(old, old.plan_shared(rank, heads)).items():
            setattr(host, child, module)


REBUILDERS[CollaborativeConfig.mechanism] = rebuild_projections
