"""The package's own scores by name, and their published formulas (test_trace.py)."""

from dataclasses import replace

import torch

import hf_hyperattn as ha
from hf_hyperattn.engines import dot_score
from hf_hyperattn.mechanisms.cone.score import ConeSpace
from hf_hyperattn.mechanisms.hype.score import with_hype
from hf_hyperattn.mechanisms.hyperbolic.score import HyperbolicSpace

F = ha.functional


def own_score(name, q, k, first, second, blend=None):
    """A score of the package: alone, or with `blend` [H] beside the host's product.

    Args:
        name: a term's, without "_on_product".
        first, second: gamma and radius, curvature and temperature, or mu and tau, [H] each.
    """
    host = dot_score(q, k)
    if name.startswith("hype"):
        places = [torch.arange(x.shape[2], dtype=q.dtype).expand(1, 1, -1) for x in (q, k)]
        return with_hype(host, places, first, second, name.removeprefix("hype_"), None, gate=blend)
    if name in ("geodesic", "squared_lorentz"):
        space = HyperbolicSpace(name, None, first, second)
    else:
        variant, mapping = ("umbral", "xi") if name == "umbral" else ("penumbral", "psi")
        space = ConeSpace(variant, mapping, name != "penumbral", False, first, second)
    if blend is None:
        return space.score(q, k)
    return replace(host, terms=(*host.terms, *space.score(q, k, host.scale, blend).terms))


def own_logits(name, q, k, first, second, blend=None):
    """The published formula [B, H, N, M], from differences of points."""
    if name.startswith("hype"):
        places = [torch.arange(x.shape[2], dtype=q.dtype) for x in (q, k)]
        logits = F.hype_bias(*places, mu=first, tau=second, form=name.removeprefix("hype_"))
    elif name in ("geodesic", "squared_lorentz"):
        logits = F.hyperbolic_scores(
            q, k, scale=q.shape[-1] ** -0.5, curvature=first, temperature=second, distance=name
        )
    else:
        variant, mapping = ("umbral", "xi") if name == "umbral" else ("penumbral", "psi")
        logits = F.cone_scores(
            q,
            k,
            variant=variant,
            mapping=mapping,
            gamma=first,
            radius=second,
            squared=name != "penumbral",
            clamp_heights=False,
        )
    if blend is None:
        return logits
    far = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q @ far.mT * q.shape[-1] ** -0.5 + blend[:, None, None] * logits
