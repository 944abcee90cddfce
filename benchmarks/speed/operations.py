"""The operations that are measured, as functions of query, key and value, and what each is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_hyperattn.engines import ENGINES, Options, attention, dot_score
from hf_hyperattn.engines.score import upcast_for_grad
from hf_hyperattn.functional import cone_attention, hype_attention, hyperbolic_attention
from hf_hyperattn.mechanisms.cone.functional import cone_space
from hf_hyperattn.mechanisms.hype.config import HypeConfig

from . import peers

#: Engines that are measured, the ones that should win first.
ORDER = ("triton", "cpu", "sdpa", "blockwise")


@dataclass(frozen=True)
class Operation:
    """One kind of attention.

    Args:
        title: what tables call it.
        attend: `attend(q, k, v, backend=..., positions=..., **options)`, shaped like SDPA.
        engines: backends that can compute it, where they are available.
        peers: other ways to the same result, `name: call(q, k, v, causal)`; those in `peers.ONLY_FORWARD` have no
            backward pass.
        limits: by device and dtype, the ratio to SDPA that forward and training are held to at d = 64 and lengths of
            512 to 8,192, and decoding where given.
    """

    title: str
    attend: Callable[..., Tensor]
    engines: tuple[str, ...] = ("triton", "cpu", "blockwise")
    peers: dict[str, Callable] = field(default_factory=dict)
    limits: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def ways(self) -> list[str]:
        """How it can be computed here: engines first, the one that should win at their head."""
        found = [e for e in ORDER if e in self.engines and e in ENGINES and usable(e)]
        return found + list(self.peers)

    def can(self, way: str, kind: str) -> bool:
        """Whether a way computes this kind of call: some peers have no backward pass."""
        return kind == "forward" or way not in peers.ONLY_FORWARD

    def limit(self, way: str, case) -> float | None:
        """What the ratio of this case is held to, by the way that should win; None for no limit."""
        if way != self.ways()[0] or case.dim not in ((64,) if case.device == "cpu" else (64, 128)):
            return None
        found = self.limits.get(f"{case.device} {case.dtype}", ())
        index = ("forward", "training", "decode").index(case.kind)
        inside = case.length == 8192 if case.kind == "decode" else 512 <= case.length <= 8192
        return found[index] if inside and index < len(found) else None

    def run(self, way: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """The output [B, H, N, dv] by one of the ways."""
        if way in self.peers:
            return self.peers[way](q, k, v, causal)
        return self.attend(q, k, v, backend=way, is_causal=causal, positions=None)

    def exact(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, causal: bool) -> Tensor:
        """The definition's output for some rows of q, whose places among the keys are `rows`."""
        mask = torch.arange(k.shape[2], device=k.device) <= rows[:, None] if causal else None
        return self.attend(q, k, v, backend="reference", attn_mask=mask, positions=rows)


def usable(engine: str) -> bool:
    """Whether the engine runs on what is measured here: kernels for a GPU are not timed in an interpreter."""
    return (
        torch.cuda.is_available() == (engine == "triton") if engine in ("triton", "cpu") else True
    )


def plain(q, k, v, *, backend, positions=None, attn_mask=None, is_causal=False):
    """Dot product attention on an engine of ours."""
    options = Options(mask=attn_mask, is_causal=is_causal)
    return attention(dot_score(q, k), v, options, backend=backend)[0].to(q.dtype)


def blended(q, k, v, *, backend, positions=None, attn_mask=None, is_causal=False):
    """q·k/sqrt(d) + 0.5 · umbral, as a patched host computes it."""
    q, k = upcast_for_grad(q), upcast_for_grad(k)
    space = cone_space(q, "umbral", None, 1.0, 1.0, True, False)
    score = dot_score(q, k)
    gate = torch.full((q.shape[1],), 0.5, dtype=score.dtype, device=q.device)
    score = score.plus(*space.score(q, k, q.shape[-1] ** -0.5, gate).terms)
    options = Options(mask=attn_mask, is_causal=is_causal)
    return attention(score, v, options, backend=backend)[0].to(v.dtype)


def hype(q, k, v, *, backend, positions=None, attn_mask=None, is_causal=False):
    """sinh at every length, so that causal calls and others do the same; the last queries are the last keys."""
    m = k.shape[2]
    mu, tau = HypeConfig(max_length=m).compute_starts("sinh", q.shape[1])
    numbers = {"mu": torch.tensor(mu, device=q.device), "tau": torch.tensor(tau, device=q.device)}
    if positions is None and q.shape[2] != m:
        positions = torch.arange(m - q.shape[2], m, device=q.device)
    return hype_attention(
        q,
        k,
        v,
        attn_mask,
        is_causal=is_causal,
        form="sinh",
        query_positions=positions,
        backend=backend,
        **numbers,
    )


def cone(variant):
    """Cone attention of a variant, as a function of query, key and value."""

    def attend(q, k, v, *, positions=None, **rest):
        return cone_attention(q, k, v, variant=variant, **rest)

    return attend


def hyperbolic(distance, aggregation):
    """Hyperbolic attention with these options, as a function of query, key and value."""

    def attend(q, k, v, *, positions=None, **rest):
        return hyperbolic_attention(q, k, v, distance=distance, aggregation=aggregation, **rest)

    return attend


def limits(forward, training, gpu, *decode, bf16=()):
    """Ratios that an operation is held to, by device and dtype, in the order of kinds of call."""
    found = {"cpu float32": (forward, training, *decode), "cuda bfloat16": gpu}
    return found | ({"cpu bfloat16": bf16} if bf16 else {})


OPERATIONS = {
    "umbral": Operation(
        "cone, umbral",
        cone("umbral"),
        peers={"naive cdist": peers.cdist_umbral, "flex": peers.flex_umbral},
        limits=limits(1.05, 1.05, (1.5, 1.5), 1.0, bf16=(1.10, 1.20)),
    ),
    "penumbral": Operation(
        "cone, penumbral", cone("penumbral"), limits=limits(1.15, 1.15, (2.0, 2.0))
    ),
    "blend": Operation("dot product + cone", blended, limits=limits(1.15, 1.15, (2.0, 2.0))),
    "squared_lorentz": Operation(
        "squared Lorentz", hyperbolic("squared_lorentz", "mean"), limits=limits(1.15, 1.15, ())
    ),
    "geodesic": Operation(
        "geodesic",
        hyperbolic("geodesic", "mean"),
        peers={"flex": peers.flex_geodesic},
        limits=limits(1.25, 1.20, (2.0, 2.0)),
    ),
    "geodesic+einstein": Operation(
        "geodesic, Einstein midpoint", hyperbolic("geodesic", "einstein")
    ),
    "squared_lorentz+einstein": Operation(
        "squared Lorentz, Einstein midpoint", hyperbolic("squared_lorentz", "einstein")
    ),
    "hype": Operation(
        "HyPE", hype, peers={"dense mask": peers.dense_hype}, limits=limits(1.10, 1.10, (1.15, 1.2))
    ),
    "hype columns": Operation("HyPE as columns", hype, engines=("sdpa",)),
    "dot": Operation("dot product", plain, engines=ORDER, peers={"eager": peers.eager}),
}
