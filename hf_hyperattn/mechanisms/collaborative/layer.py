"""Collaborative heads in an attention layer.

`FullLayer` mixes all dimensions next to the layer's projections; `SharedLayer` serves converted
layers of lower rank.
"""

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
from .reference import collaborative_scores, concatenate_heads


def collaborative_layer(
    config: CollaborativeConfig, host: Host | None, mode: str = "replace", heads=None
) -> MechanismLayer:
    """Return the layer for a config: `FullLayer` without a rank, else `SharedLayer`."""
    return (FullLayer if config.rank is None else SharedLayer)(config, host, mode, heads)


class FullLayer(MechanismLayer):
    """Let every head read the dimensions of all heads: S = scale · (q ∘ m_h) · k.

    q and k are the concatenated queries and keys of all heads. The parameter `mixing` [H, H·d],
    initialised to zero, is the difference of m_h from the indicator of the head's own dimensions.
    Zero is the identity, so "blend" and "replace" are the same.

    Raises:
        ValueError: The attention layer has rotary positions, or its head dimension is unknown.
    """

    honours_heads = True
    mixes_queries = False

    def __init__(
        self, config: CollaborativeConfig, host: Host | None, mode: str = "replace", heads=None
    ):
        super().__init__(config, host, mode, heads)
        known = check_host(host, "head_dim")
        self.mixing = nn.Parameter(torch.zeros(known.heads, known.heads * known.head_dim))

    def change(self, plan: Plan) -> Plan:
        mixing = self.mixing.to(get_working_dtype(plan))
        mask = self.head_mask(plan.call)
        # Heads that are not chosen keep their own dimensions.
        change = mixing if mask is None else mixing * mask[:, None]
        return with_shared_score(plan, own_dimensions(mixing) + change)

    def identical(self) -> bool:
        return not bool(self.mixing.any())


class SharedLayer(MechanismLayer):
    """A converted attention layer whose queries and keys hold R shared dimensions.

    The projections write them into rows of H·d numbers, so that they pass through the layer's
    reshaping and its cache. In the keys, the content bias follows the shared dimensions. Unused
    numbers are zero. The parameter is `mixing` [H, R].

    Raises:
        ValueError: The attention layer has rotary positions, or the rank exceeds its dimensions.
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
        # Values come from the checkpoint or from `reset_parameters`.
        self.mixing = nn.Parameter(torch.empty(known.heads, config.rank or 0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give every head its own block of dimensions: ordinary heads of dimension R / H."""
        init.copy_(self.mixing, own_dimensions(self.mixing))

    def change(self, plan: Plan) -> Plan:
        return with_shared_score(plan, self.mixing.to(get_working_dtype(plan)))


def get_working_dtype(plan: Plan) -> torch.dtype:
    """Return the dtype in which the queries and keys of a plan are computed."""
    return working_dtype(plan.call.query, plan.call.key)


def own_dimensions(mixing: Tensor) -> Tensor:
    """Return indicators [H, width] of each head's own block of dimensions."""
    heads, width = mixing.shape
    # Integer division spreads the remainder over the heads if H does not divide the width.
    owner = torch.arange(width, device=mixing.device) * heads // width
    return (owner == torch.arange(heads, device=mixing.device)[:, None]).to(mixing.dtype)


def with_shared_score(plan: Plan, mixing: Tensor) -> Plan:
    """Return the plan with the score of heads that share R dimensions."""
    call = plan.call
    heads, rank = mixing.shape
    query, key = (concatenate_heads(x, heads) for x in (call.query, call.key))
    # Keys with enough room hold the content bias of every head behind the shared dimensions.
    content = key[..., rank : rank + heads] if rank + heads <= key.shape[-1] else None
    score = shared_score(
        query=query[..., :rank],
        key=key[..., :rank],
        mixing=mixing,
        scale=call.scale,
        content=content,
        key_heads=call.value.shape[1],
    )
    return plan.change(score=score)


class SharedDotTerm(DotTerm):
    """The dot product of features that are much wider than the values.

    It is a term of its own, so that engines for features as wide as values do not take it. On CPUs,
    torch's own attention is up to 2.5 times slower here than tiles of rows.
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
    """Return the score for the engines: mixed queries times keys that all heads share.

    The content bias is part of the product. The biases of all heads are appended to the keys, and a
    one-hot vector of the head to its queries.

    Args:
        query: Shape [B, N, R].
        key: Shape [B, M, R].
        mixing: Shape [H, R].
        scale: Scale of the logits.
        content: Content bias, shape [B, M, H], or None.
        key_heads: Number of value heads; the keys are expanded to it without a copy.
    """
    dtype = mixing.dtype
    heads = mixing.shape[0]
    left = query.to(dtype)[:, None] * mixing[:, None]
    right = key
    if content is not None:
        ones = torch.eye(heads, dtype=dtype, device=query.device)[:, None].expand(
            *left.shape[:3], -1
        )
        left = torch.cat([left, ones], -1)
        right = torch.cat([key, content], -1)
    # `expand` gives every value head the same keys without copying them.
    features = dot_score(left, right[:, None].expand(-1, key_heads, -1, -1), scale).features()
    logits = partial(collaborative_scores, query, key, mixing, scale, content)
    return PairScore(*features, (ScoreTerm(SHARED_DOT, logits, linear_features=lambda: features),))


def check_host(host: Host | None, *dims: str) -> Any:
    """Return the attention layer, if collaborative heads can be used in it.

    Raises:
        ValueError: It has rotary positions, which rotate the dimensions of every head separately,
            or is unknown.
    """
    known = checks.check_host("collaborative", host, *dims)
    # Shared dimensions would mix channels that rotate at different angles.
    if known.rotary:
        raise ValueError(
            f"collaborative was given {known.name}, whose queries and keys are turned by rotary positions "
            f"({known.rotary}): what heads share would depend on absolute positions; allowed: hosts without "
            "rotary positions, such as BERT's, GPT-2's, OPT's, BART's, T5's, ViT's"
        )
    return known


def check_rank(rank: int | None, host: Host) -> None:
    """Raise ValueError if the rank exceeds the dimensions of all heads together."""
    full = None if host.head_dim is None else host.heads * host.head_dim
    if full is None or rank is None or rank > full:
        raise ValueError(
            f"CollaborativeConfig.rank={rank} is above the full rank of {host.name}; allowed: 1 to "
            f"{full} ({host.heads} heads of {host.head_dim})"
        )
