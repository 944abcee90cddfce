"""Informer: calls the attention interface with `attention_type="full"`; refused with "prob", its default.

What differs. ProbSparse attention scores a random sample of keys, keeps the queries whose scores are farthest from
uniform, and gives the others the mean of the values: no attention call can say that. It adds the mask to its scores,
so the bool masks of another implementation would leave the decoder without causality, silently.

How it is routed. It is not: a model with such modules is refused, one without needs no route.
"""

from __future__ import annotations

from .routing import Route


class InformerSparseRoute(Route):
    """Refuses `InformerProbSparseAttention`."""

    @classmethod
    def check(cls, module):
        raise ValueError(
            "informer: attention_type='prob' samples keys and queries, which no attention call can express, and is "
            "not served; build the model with attention_type='full'"
        )


ROUTES = {"InformerProbSparseAttention": InformerSparseRoute}
