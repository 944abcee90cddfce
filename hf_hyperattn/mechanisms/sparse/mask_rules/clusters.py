"""`Clusters`: a rule that groups keys by k-means and opens the best clusters.

It is related to Multipole Attention (arXiv 2506.13059).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ....config.fields import option
from ...selection.best import select_best
from ..rules import RuleCall, share_of, sparse_rule
from ..selection import (
    CHUNK_HELP,
    QUERY_HELP,
    SELECTORS,
    SelectingRule,
    Selector,
    split_chunks,
)


@sparse_rule("clusters")
@dataclass(frozen=True)
class Clusters(SelectingRule):
    """Show the nearest tokens, the first ones, and the best `top` clusters of keys.

    Segment s holds tokens s·segment ... (s+1)·segment - 1. `rounds` rounds of k-means (Lloyd) put
    the keys of each segment into segment/size clusters. They start from evenly spaced keys, so
    every run finds the same clusters.

    A chunk of queries that begins at token c sees the tokens of its own segment, those less than
    `near` before each query, and the sinks. It chooses among the clusters of earlier segments that
    reach back further than `near` from c. Let q be the chunk's selecting vector. The score of a
    cluster C is scale·q·(its mean key) + log|C|.
    """

    near: int = option(64, "number of tokens up to the query itself that are seen", least=1)
    sinks: int = option(4, "number of first tokens of the text that are seen", least=0)
    segment: int = option(
        512, "tokens whose keys are clustered together, once they are all there", least=1
    )
    size: int = option(16, "tokens of a cluster, on average; a divisor of segment", least=1)
    top: int = option(16, "number of clusters that are opened", least=0)
    rounds: int = option(4, "rounds of k-means", least=0, most=10_000)
    query: Selector = option("own", QUERY_HELP, choices=SELECTORS)
    chunk: int = option(16, CHUNK_HELP + "; a divisor of segment", least=1)

    def __post_init__(self):
        super().__post_init__()
        for name in ("size", "chunk"):
            if self.segment % getattr(self, name):
                self._refuse(name, f"divisors of segment={self.segment}")

    def share(self, length: int) -> float:
        """Return the share of causal logits that a head computes.

        Counted are the tokens seen, the clusters scored, and the distances of k-means.

        A score is divided by the chunk that shares it. A cluster counts as `size` tokens; chosen
        ones may be larger.
        """
        places = torch.arange(length)
        per_segment = self.segment // self.size
        own = places // self.segment * self.segment
        opening = torch.minimum(own, (places - self.near + 1).clamp_min(0))
        start = places // self.chunk * self.chunk
        clusters = self.count_segments_before(start, self.near) * per_segment
        near = places - opening + 1
        opened = clusters.clamp_max(self.top) * self.size
        seen = near + opening.clamp_max(self.sinks) + opened
        # A segment is clustered once, when its last token arrives.
        built = torch.zeros(length, dtype=torch.float64)
        built[self.segment - 1 :: self.segment] = (self.rounds + 1) * self.segment * per_segment
        # With at most `top` clusters all are opened, and none has to be scored.
        scored = clusters.where(clusters > self.top, 0).double() / self.chunk
        share_of_clustering = float(built.sum()) / (length * (length + 1) / 2)
        return min(1.0, share_of(seen + scored) + share_of_clustering)

    def count_segments_before(self, start: Tensor, near: int) -> Tensor:
        """Return the number of first segments among which a chunk chooses.

        Args:
            start: First token of the chunk.
            near: As in the class.
        """
        return torch.minimum(start, (start - near).clamp_min(0) + self.segment - 1) // self.segment

    def visible(self, call: RuleCall) -> Tensor:
        """Return bool [B, H, N, M], see `SparseRule.visible`."""
        chunks = split_chunks(call, self.chunk, self.query)
        segments = call.key.shape[2] // self.segment
        # Seen by place: the own segment, the near tokens and the sinks.
        own = chunks.start // self.segment * self.segment
        seen = call.tokens >= chunks.spread_to_queries(own)
        seen = seen | (call.tokens > call.places - self.near)
        seen = seen | (call.tokens < self.sinks)
        if not segments or not self.top:
            return seen
        keys = call.key[:, :, : segments * self.segment].unflatten(2, (segments, self.segment))
        label, means, count = cluster_keys(keys, self.segment // self.size, self.rounds)
        clusters = means.shape[3]
        # The segment of each cluster, with the clusters of all segments in one row.
        number = torch.arange(segments, device=keys.device).repeat_interleave(clusters)
        is_before = number < self.count_segments_before(chunks.start, self.near)
        candidates = is_before & (count.flatten(2)[:, :, None] > 0)
        if call.window is not None:
            # A cache with a window may have dropped the segment, or drop it before the chunk ends.
            is_held = number * self.segment >= chunks.start + self.chunk - call.window
            candidates = candidates & is_held
        chunks.check_known(call, candidates.any(1, keepdim=True))
        # log|C| estimates the weight of |C| keys that all equal their mean.
        logits = call.scale * chunks.query @ means.flatten(2, 3).mT
        score = logits + count.flatten(2).log()[:, :, None]
        chosen = chunks.spread_to_queries(select_best(score, candidates, self.top))
        # From clusters back to tokens: the column of each token's cluster.
        first = torch.arange(segments, device=keys.device)[:, None] * clusters
        cluster = (label + first).flatten(2)
        opened = chosen.gather(3, cluster[:, :, None].expand(-1, -1, chosen.shape[2], -1))
        # Tokens after the last complete segment are in no cluster.
        rest = opened.new_zeros(*opened.shape[:3], call.key.shape[2] - opened.shape[3])
        return torch.cat([opened, rest], 3) | seen


def cluster_keys(keys: Tensor, clusters: int, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cluster the keys of each segment by k-means.

    Args:
        keys: [B, H, S, T, d].
        clusters: C, at most T.
        rounds: Number of times that means are moved. A cluster without keys keeps its mean.

    Returns:
        The cluster of each key, int64 [B, H, S, T]; the means [B, H, S, C, d]; the number of keys
        [B, H, S, C]. If a key is equally near to several means, it goes to the first.
    """
    size = keys.shape[3] // clusters
    means = keys[:, :, :, size // 2 :: size][:, :, :, :clusters]
    for _ in range(rounds + 1):
        # |k - m|² without |k|², which is the same for all means.
        label = (means.square().sum(-1)[..., None, :] - 2 * keys @ means.mT).argmin(-1)
        member = one_hot(label, clusters).to(keys.dtype)
        count = member.sum(3)
        moved = member.mT @ keys / count.clamp_min(1)[..., None]
        means = torch.where(count[..., None] > 0, moved, means)
    return label, means, count
