"""`edge_attention`: attention over the edges of a graph, with any score.

Time and memory grow with the number of edges, not with all pairs of nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..engines.score import working_dtype
from .checks import check_call, check_tensor


def edge_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Tensor,
    scores: Callable[..., Tensor] | None = None,
    **options,
) -> Tensor:
    """Compute attention in which each node attends to nodes with an edge to it.

    With edges between all pairs it is ordinary attention with these scores. In a layer of PyTorch
    Geometric, `edges` is its `edge_index`, and the output is the sum that its `propagate` returns.

    Args:
        query: [targets, H, d], one row per node.
        key: [sources, H, d].
        value: [sources, H, dv].
        edges: Integers [2, E], sources first. Several edges between two nodes count separately.
        scores: Function of query [B, H, n, d] and key [B, H, m, d] that returns logits [B, H, n,
            m], such as `cone_scores` and `hyperbolic_scores`. None: the dot product divided by
            sqrt(d).
        **options: Further arguments of `scores`.

    Returns:
        [targets, H, dv] in the dtype of `value`, summed in float32 at least; 0 at nodes without an
        incoming edge.

    Raises:
        ValueError: A shape or dtype is not as above, or an edge names a node that does not exist.
    """
    for name, rows in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, rows)
        if rows.dim() != 3:
            raise ValueError(
                f"{name} has shape {tuple(rows.shape)}; allowed: 3 axes, [nodes, heads, dim]"
            )
    _check_edges(edges, len(query), len(key), len(value))
    # The common checks expect [batch, heads, length, dim].
    q, k, v = (rows.transpose(0, 1)[None] for rows in (query, key, value))
    check_call(q, k, v, enable_gqa=False)
    source, target = edges.long()
    # In half precision, sums over many edges would lose small terms, in the gradients, too.
    dtype, out_dtype = working_dtype(query, key, value), value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # Each edge is a call with one query and one key, [E, H, 1, d].
    queries = query[target][:, :, None]
    keys = key[source][:, :, None]
    compute_logits = _dot_product if scores is None else scores
    logits = compute_logits(queries, keys, **options)[..., 0, 0].to(dtype)
    # Softmax over the edges of each target. Subtracting the largest logit keeps `exp` finite; its
    # gradient cancels.
    nodes = target[:, None].expand_as(logits)
    most = logits.detach().new_full((len(query), logits.shape[1]), -torch.inf)
    most = most.scatter_reduce(0, nodes, logits.detach(), "amax")
    weights = (logits - most[target]).exp()
    sums = torch.zeros_like(most).index_add(0, target, weights)
    weights = weights / sums[target]
    rows = weights[..., None] * value[source]
    return rows.new_zeros(len(query), *rows.shape[1:]).index_add(0, target, rows).to(out_dtype)


def _dot_product(query: Tensor, key: Tensor) -> Tensor:
    """Return q·k / sqrt(d), the default score."""
    return query @ key.mT * query.shape[-1] ** -0.5


def _check_edges(edges: Tensor, targets: int, sources: int, values: int) -> None:
    """Raise unless `edges` holds two rows of existing node numbers."""
    check_tensor("edges", edges)
    if edges.dim() != 2 or edges.shape[0] != 2 or edges.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"edges has shape {tuple(edges.shape)}, {edges.dtype}; allowed: integers [2, edges]"
        )
    if values != sources:
        raise ValueError(f"value has {values} nodes, key has {sources}; they must be equal")
    # On a GPU, a wrong index would end in a device assertion, after which CUDA is unusable.
    for row, (name, count) in zip(edges, (("key", sources), ("query", targets))):
        if row.numel() and not bool(((row >= 0) & (row < count)).all()):
            wrong = row[(row < 0) | (row >= count)][0].item()
            raise ValueError(f"edges names node {wrong} of {name}; allowed: 0 to {count - 1}")
