"""Collaborative heads inside a host: at full rank beside its projections, and at a lower rank in their place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...engines import PairScore, ScoreTerm, dot_score, working_dtype
from ...engines.score import DotTerm, register_term
from .. import checks
from ..base import Host, MechanismLayer, Plan
from .config import CollaborativeConfig
from .reference import collaborative_scores, concatenated


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

    def __init__(
        self, config: CollaborativeConfig, host: Host | None, mode: str = "replace", heads=None
    ):
        super().__init__(config, host, mode, heads)
        known = check_host(host, "head_dim")
        self.mixing = nn.Parameter(torch.zeros(known.heads, known.heads * known.head_dim))

    def change(self, plan: Plan) -> Plan:
        mixing, mask = self.mixing.to(plan_dtype(plan)), self.head_mask(plan.call)
        change = mixing if mask is None else mixing * mask[:, None]
        return with_shared_score(plan, own_dimensions(mixing) + change)

    def identical(self) -> bool:
        return not bool(self.mixing.any())


class SharedLayer(MechanismLayer):
    """A converted host: its queries and keys hold R shared dimensions, and its keys after them the content bias.

    The host's projections write them into rows of H·d numbers, as wide as the host expects, so that they pass through
    its reshaping and its cache; what is not used is zero. One parameter, `mixing` [H, R].

    Raises:
        ValueError: a host with rotary positions, or a rank above what there is.
    """

    def __init__(
        self, config: CollaborativeConfig, host: Host | None, mode: str = "replace", heads=None
    ):
        super().__init__(config, host, mode, heads)
        known = check_host(host)
        check_rank(config.rank, known)
        if heads is not None:
            raise ValueError(
                f"collaborative with a rank shares the projections of all heads of {known.name}; allowed: heads=None"
            )
        self.mixing = nn.Parameter(torch.empty(known.heads, config.rank or 0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every head its own block of dimensions: ordinary heads of dimension R / H."""
        init.copy_(self.mixing, own_dimensions(self.mixing))

    def change(self, plan: Plan) -> Plan:
        return with_shared_score(plan, self.mixing.to(plan_dtype(plan)))


def plan_dtype(plan: Plan) -> torch.dtype:
    """What the host's queries and keys are computed in."""
    return working_dtype(plan.call.query, plan.call.key)


def own_dimensions(mixing: Tensor) -> Tensor:
    """As mixing vectors [H, width], with 1 at the dimensions of each head, as equal blocks as there are."""
    heads, width = mixing.shape
    owner = torch.arange(width, device=mixing.device) * heads // width
    return (owner == torch.arange(heads, device=mixing.device)[:, None]).to(mixing.dtype)


def with_shared_score(plan: Plan, mixing: Tensor) -> Plan:
    """The plan with the score of heads that share R dimensions, by mixing vectors [H, R]."""
    call, (heads, rank) = plan.call, mixing.shape
    query, key = (concatenated(x, heads) for x in (call.query, call.key))
    # rows that have room for it hold the content bias of every head after the shared dimensions
    content = key[..., rank : rank + heads] if rank + heads <= key.shape[-1] else None
    score = shared_score(
        query[..., :rank], key[..., :rank], mixing, call.scale, content, call.value.shape[1]
    )
    return plan.change(score=score)


class SharedDotTerm(DotTerm):
    """The dot product of features much wider than the values.

    A term of its own, so that engines made for features as wide as values leave it to the others: on CPUs torch's own
    attention is up to 2.5 times as slow here as tiles of rows.
    """

    name = "shared_dot"


SHARED_DOT = register_term(SharedDotTerm())


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
        ones = torch.eye(heads, dtype=dtype, device=query.device)[:, None].expand(
            *left.shape[:3], -1
        )
        left, right = torch.cat([left, ones], -1), torch.cat([key, content], -1)
    features = dot_score(left, right[:, None].expand(-1, key_heads, -1, -1), scale).features()
    logits = partial(collaborative_scores, query, key, mixing, scale, content)
    return PairScore(*features, (ScoreTerm(SHARED_DOT, logits, linear_features=lambda: features),))


def check_host(host: Host | None, *dims: str) -> Any:
    """The host; refuse rotary positions, which turn the dimensions of every head by themselves, and use by name."""
    known = checks.check_host("collaborative", host, *dims)
    if known.rotary:
        raise ValueError(
            f"collaborative was given {known.name}, whose queries and keys are turned by rotary positions "
            f"({known.rotary}): what heads share would depend on absolute positions; allowed: hosts without "
            "rotary positions, such as BERT's, GPT-2's, OPT's, BART's, T5's, ViT's"
        )
    return known


def check_rank(rank: int | None, host: Host) -> None:
    """Refuse a rank above the dimensions of all heads together."""
    full = None if host.head_dim is None else host.heads * host.head_dim
    if full is None or rank is None or rank > full:
        raise ValueError(
            f"CollaborativeConfig.rank={rank} is above the full rank of {host.name}; allowed: 1 to "
            f"{full} ({host.heads} heads of {host.head_dim})"
        )
