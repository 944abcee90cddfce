"""Clusters of the keys, of which a query opens the best (kin of Multipole Attention, arXiv 2506.13059)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ....fields import option
from ..rules import RuleCall, share_of, sparse_rule
from ..selection import CHUNK_HELP, QUERY_HELP, SELECTORS, SelectingRule, Selector, best, chunks_of


@sparse_rule("clusters")
@dataclass(frozen=True)
class Clusters(SelectingRule):
    """The nearest tokens, the first ones, and the `top` clusters of all other keys with the largest scores.

    Segment s holds tokens s·segment ... (s+1)·segment - 1. The keys of each are put into segment/size clusters by
    `rounds` rounds of k-means (Lloyd), from keys that are evenly spaced in it: the same clusters in every run. A chunk
    of queries that begins at token c sees the tokens of its own segment, those less than `near` before each query, the
    sinks, and chooses among the clusters of the segments before its own that reach back further than `near` from c.
    With q what the chunk selects by, the score of a cluster C is scale·q·(its mean key) + log|C|.
    """

    near: int = option(64, "so many tokens up to the query itself are seen", least=1)
    sinks: int = option(4, "so many first tokens of the text are seen", least=0)
    segment: int = option(
        512, "tokens whose keys are put into clusters together, once they are all there", least=1
    )
    size: int = option(16, "tokens of a cluster, on average; a divisor of segment", least=1)
    top: int = option(16, "so many clusters are opened", least=0)
    rounds: int = option(4, "rounds of k-means", least=0, most=10_000)
    query: Selector = option("own", QUERY_HELP, choices=SELECTORS)
    chunk: int = option(16, CHUNK_HELP + "; a divisor of segment", least=1)

    def __post_init__(self):
        super().__post_init__()
        for name in ("size", "chunk"):
            if self.segment % getattr(self, name):
                self._refuse(name, f"divisors of segment={self.segment}")

    def share(self, length: int) -> float:
        """Tokens seen, clusters scored over the queries that share them, and the distances that k-means computes.

        A cluster counts as `size` tokens; those that are chosen may be larger.
        """
        places, per_segment = torch.arange(length), self.segment // self.size
        own = places // self.segment * self.segment
        opening = torch.minimum(own, (places - self.near + 1).clamp_min(0))
        start = places // self.chunk * self.chunk
        clusters = self.segments_before(start, self.near) * per_segment
        seen = (
            places
            - opening
            + 1
            + opening.clamp_max(self.sinks)
            + clusters.clamp_max(self.top) * self.size
        )
        built = torch.zeros(length, dtype=torch.float64)
        built[self.segment - 1 :: self.segment] = (self.rounds + 1) * self.segment * per_segment
        scored = clusters.where(clusters > self.top, 0).double() / self.chunk
        share_of_clustering = float(built.sum()) / (length * (length + 1) / 2)
        return min(1.0, share_of(seen + scored) + share_of_clustering)

    def segments_before(self, start: Tensor, near: int) -> Tensor:
        """How many segments a chunk that begins at `start` chooses among: the first ones."""
        return torch.minimum(start, (start - near).clamp_min(0) + self.segment - 1) // self.segment

    def visible(self, call: RuleCall) -> Tensor:
        """[B, H, N, M]."""
        chunks, segments = (
            chunks_of(call, self.chunk, self.query),
            call.key.shape[2] // self.segment,
        )
        own = chunks.start // self.segment * self.segment
        seen = (call.tokens >= chunks.spread(own)) | (call.tokens > call.places - self.near)
        seen = seen | (call.tokens < self.sinks)
        if not segments or not self.top:
            return seen
        keys = call.key[:, :, : segments * self.segment].unflatten(2, (segments, self.segment))
        label, means, count = k_means(keys, self.segment // self.size, self.rounds)
        number = torch.arange(segments, device=keys.device).repeat_interleave(means.shape[3])
        candidates = (number < self.segments_before(chunks.start, self.near)) & (
            count.flatten(2)[:, :, None] > 0
        )
        if call.window is not None:
            candidates = candidates & (
                number * self.segment >= chunks.start + self.chunk - call.window
            )
        chunks.check(call, candidates.any(1, keepdim=True))
        score = (
            call.scale * chunks.query @ means.flatten(2, 3).mT + count.flatten(2).log()[:, :, None]
        )
        chosen = chunks.spread(best(score, candidates, self.top))
        cluster = (
            label + torch.arange(segments, device=keys.device)[:, None] * means.shape[3]
        ).flatten(2)
        opened = chosen.gather(3, cluster[:, :, None].expand(-1, -1, chosen.shape[2], -1))
        rest = opened.new_zeros(*opened.shape[:3], call.key.shape[2] - opened.shape[3])
        return torch.cat([opened, rest], 3) | seen


def k_means(keys: Tensor, clusters: int, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Clusters of the keys of every segment.

    Args:
        keys: [B, H, S, T, d].
        clusters: C, at most T.
        rounds: how often means are moved; a cluster without keys keeps its mean.

    Returns:
        The cluster of every key, int64 [B, H, S, T]; the mean of its keys [B, H, S, C, d]; how many it has
        [B, H, S, C]. Of equally near clusters a key takes the first.
    """
    size = keys.shape[3] // clusters
    means = keys[:, :, :, size // 2 :: size][:, :, :, :clusters]
    for _ in range(rounds + 1):
        label = (means.square().sum(-1)[..., None, :] - 2 * keys @ means.mT).argmin(-1)
        member = one_hot(label, clusters).to(keys.dtype)
        count = member.sum(3)
        means = torch.where(
            count[..., None] > 0, member.mT @ keys / count.clamp_min(1)[..., None], means
        )
    return label, means, count
