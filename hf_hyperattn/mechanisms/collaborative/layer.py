"""Collaborative heads inside a host: at full rank beside its projections, and at a lower rank in their place."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...engines import PairScore, ScoreTerm, dot_score, working_dtype
from ..base import Host, MechanismLayer, Plan
from .config import CollaborativeConfig
from .score import SHARED_DOT, concatenated, definition


def collaborative_layer(
    config: CollaborativeConfig, host: Host | None, mode: str = "replace", heads=None
) -> MechanismLayer:
    """The layer that a config means: `FullLayer` without a rank, `SharedLayer` with one."""
    return (FullLayer if config.rank is None else SharedLayer)(config, host, mode, heads)


class FullLayer(MechanismLayer):
    """Every head reads the dimensions of all: S = scale · (q ∘ m_h) · k over the concatenated queries and keys.

    One parameter, `mixing` [H, H·d], zero at first: what m_h differs by from the indicator of the head's own
    dimensions. Blend and replace are the same, since zero is the identity.

    Raises:
        ValueError: a host with rotary positions, or one that does not tell its head dimension.
    """

    honours_heads = True

    def __init__(self, config: CollaborativeConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        check_host(host)
        if host.head_dim is None:
            raise ValueError(
                f"collaborative cannot tell the head dimension of {host.name}; allowed: hosts that say it"
            )
        self.mixing = nn.Parameter(torch.zeros(host.heads, host.heads * host.head_dim))

    def change(self, plan: Plan) -> Plan:
        call, heads = plan.call, plan.call.query.shape[1]
        query, key = (concatenated(x, heads) for x in (call.query, call.key))
        mixing = self.mixing.to(working_dtype(query, key))
        chosen = self.chosen(call.query)
        own = own_dimensions(heads, query.shape[-1], mixing)
        mixing = own + (mixing if chosen is None else mixing * chosen[:, None])
        score = shared_score(query, key, mixing, call.scale, key_heads=call.value.shape[1])
        return plan.change(score=score)

    def identical(self) -> bool:
        return not bool(self.mixing.any())


class SharedLayer(MechanismLayer):
    """A converted host: its queries and keys hold R shared dimensions, and its keys after them the content bias.

    The host's projections write them into rows of H·d numbers, as wide as the host expects, so that they pass through
    its reshaping and its cache; what is not used is zero. One parameter, `mixing` [H, R].

    Raises:
        ValueError: a host with rotary positions, or a rank above what there is.
    """

    def __init__(self, config: CollaborativeConfig, host: Host | None, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        check_host(host)
        check_rank(config.rank, host)
        if heads is not None:
            raise ValueError(
                f"collaborative with a rank shares the projections of all heads of {host.name}; allowed: heads=None"
            )
        self.mixing = nn.Parameter(torch.empty(host.heads, config.rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every head its own block of dimensions: ordinary heads of dimension R / H."""
        init.copy_(self.mixing, own_dimensions(*self.mixing.shape, self.mixing))

    def change(self, plan: Plan) -> Plan:
        call, (heads, rank) = plan.call, self.mixing.shape
        query, key = (concatenated(x, heads) for x in (call.query, call.key))
        content = key[..., rank : rank + heads] if has_content(rank, heads, key.shape[-1]) else None
        mixing = self.mixing.to(working_dtype(query, key))
        score = shared_score(
            query[..., :rank], key[..., :rank], mixing, call.scale, content, call.value.shape[1]
        )
        return plan.change(score=score)


def has_content(rank: int, heads: int, width: int) -> bool:
    """Whether rows of that width have room for the content bias of every head after the shared dimensions."""
    return rank + heads <= width


def own_dimensions(heads: int, width: int, like: Tensor) -> Tensor:
    """[H, width] with 1 at the dimensions of each head, as equal blocks as there are."""
    owner = torch.arange(width, device=like.device) * heads // width
    return (owner == torch.arange(heads, device=like.device)[:, None]).to(like.dtype)


def shared_score(
    query: Tensor,
    key: Tensor,
    mixing: Tensor,
    scale: float,
    content: Tensor | None = None,
    key_heads: int = 1,
) -> PairScore:
    """The score for engines: one product of mixed queries with keys that all heads share.

    The content bias rides in it: to the keys are appended the biases of all heads, to a head's queries a 1 at its own.

    Args:
        query: [B, N, R], key: [B, M, R]; mixing [H, R]; content [B, M, H] or None.
        key_heads: heads of the values, for which the keys are repeated without a copy.
    """
    dtype, heads = mixing.dtype, mixing.shape[0]
    left = query.to(dtype)[:, None] * mixing[:, None]
    right = key
    if content is not None:
        ones = torch.eye(heads, dtype=dtype, device=query.device)[:, None].expand(*left.shape[:3], -1)
        left, right = torch.cat([left, ones], -1), torch.cat([key, content], -1)
    features = dot_score(left, right[:, None].expand(-1, key_heads, -1, -1), scale).features()
    logits = partial(definition, query, key, mixing, scale, content)
    return PairScore(*features, (ScoreTerm(SHARED_DOT, logits, linear_features=lambda: features),))


def check_host(host: Host | None) -> None:
    """Refuse a mechanism used by name, and rotary positions: they turn the dimensions of every head by themselves."""
    if host is None:
        raise ValueError(
            "collaborative has mixing vectors to learn; allowed: patch_model or convert, not a name"
        )
    if host.rotary:
        raise ValueError(
            f"collaborative was given {host.name}, whose queries and keys are turned by rotary positions "
            f"({host.rotary}): what heads share would depend on absolute positions; allowed: hosts without "
            "rotary positions, such as BERT's, GPT-2's, OPT's, BART's, T5's, ViT's"
        )


def check_rank(rank: int, host: Host) -> None:
    """Refuse a rank above the dimensions of all heads together."""
    full = None if host.head_dim is None else host.heads * host.head_dim
    if full is None or rank > full:
        raise ValueError(
            f"CollaborativeConfig.rank={rank} is above the full rank of {host.name}; allowed: 1 to "
            f"{full} ({host.heads} heads of {host.head_dim})"
        )
