"""Random calls of attention for test_sweep.py: shapes, scores, options and inputs, all from one seed."""

from __future__ import annotations

import math
import random

import torch

from hf_hyperattn.engines import Options, PairScore, dot_score
from hf_hyperattn.engines.score import upcast_for_grad
from hf_hyperattn.mechanisms.cone.score import ConeSpace
from hf_hyperattn.mechanisms.hype.score import with_hype
from hf_hyperattn.mechanisms.hyperbolic.score import HyperbolicSpace
from tests.oracles.cases import tensor

CONES = {"umbral": ("umbral", "xi"), "penumbral": ("penumbral", "psi")}
DISTANCES = ("geodesic", "squared_lorentz")
SCORES = ("dot", *CONES, *DISTANCES)
BLENDS = (
    None,
    None,
    *CONES,
    *DISTANCES,
)  # what is added to a dot product, with a gate; None: nothing
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Call:
    """A random call: `settings` says all about it, `leaves` are its inputs in float64 but rounded to its dtype."""

    def __init__(self, seed: int):
        pick = random.Random(seed)
        self.dtype = pick.choice(DTYPES)
        self.score = pick.choice(SCORES)
        self.blend = pick.choice(BLENDS) if self.score == "dot" else None
        self.hype = pick.random() < 0.25
        kv_heads, group = pick.randint(1, 3), pick.choice((1, 1, 2, 3))
        batch, heads = pick.randint(1, 3), kv_heads * group
        n, m = (int(math.exp(pick.uniform(0, math.log(400)))) for _ in range(2))
        m = n if pick.random() < 0.4 else m
        d, dv = (int(math.exp(pick.uniform(math.log(2), math.log(256)))) for _ in range(2))
        self.shape = (batch, heads, kv_heads, n, m, d, d if pick.random() < 0.6 else dv)
        self.ties = m > 1 and pick.random() < 0.4
        self.magnitude = pick.choice((1e-2, 0.5, 1.0))
        self.options, tensors = self.asked(pick, seed)
        self.leaves = {
            "query": tensor(batch, heads, n, d, seed=seed, scale=self.magnitude),
            "key": tensor(batch, kv_heads, m, d, seed=seed + 1, scale=self.magnitude),
            "value": tensor(batch, kv_heads, m, self.shape[-1], seed=seed + 2),
        }
        if self.ties:
            self.tie(pick)
        self.leaves = {name: t.to(self.dtype).double() for name, t in self.leaves.items()}
        for i, name in enumerate(("gate", "first", "second", "mu", "tau")):
            positive = tensor(heads, seed=seed + 10 + i).exp()
            self.leaves[name] = {
                "gate": tensor(heads, seed=seed + 10),
                "mu": positive / max(n, m),
            }.get(name, positive)
        self.leaves |= {name: tensors[name] for name in ("sinks",) if name in tensors}
        self.tensors = tensors

    def asked(self, pick: random.Random, seed: int) -> tuple[dict, dict]:
        """Options that are numbers, and those that are tensors, in float64 or bool."""
        batch, heads, _, n, m, *_ = self.shape
        found = {"is_causal": pick.random() < 0.5}
        if pick.random() < 0.2:
            found["window"] = pick.randint(1, m)
        if pick.random() < 0.2:
            found["offset"] = pick.randint(0, m)
        if pick.random() < 0.15:
            found["softcap"] = pick.choice((0.5, 5.0))
        tensors, kind = {}, pick.random()
        shape = [size if pick.random() < 0.6 else 1 for size in (batch, heads, n, m)]
        if kind < 0.25:
            tensors["mask"] = tensor(*shape, seed=seed + 20) < pick.choice((-0.9, 0.5))
        elif kind < 0.4:
            tensors["mask"] = tensor(*shape, seed=seed + 20, scale=3.0)
            tensors["mask"].masked_fill_(tensor(*shape, seed=seed + 21) < -0.7, -math.inf)
        if pick.random() < 0.15:
            tensors["bias"] = tensor(1, heads, n, m, seed=seed + 22)
        if pick.random() < 0.2:
            tensors["sinks"] = tensor(heads, seed=seed + 23, scale=2.0)
        return found, tensors

    def tie(self, pick: random.Random) -> None:
        """Some keys equal other keys or queries, or nearly so; some heights (last coordinates) equal, vectors zero."""
        q, k = self.leaves["query"], self.leaves["key"]
        n, m = q.shape[2], k.shape[2]
        for _ in range(1 + m // 4):
            i, j, other = pick.randrange(n), pick.randrange(m), pick.randrange(m)
            what = pick.random()
            if what < 0.2:
                k[:, :, j] = q[:, : k.shape[1], i]
            elif (
                what < 0.4
            ):  # the query of the first head that attends to the key, and a little noise
                noise = tensor(
                    *k[:, :, j].shape, seed=pick.randrange(2**31), scale=10 ** pick.uniform(-5, -2)
                )
                k[:, :, j] = q[:, :: q.shape[1] // k.shape[1], i] + noise
            elif what < 0.7:
                k[:, :, j] = k[:, :, other]
            elif what < 0.9:
                k[:, :, j, -1] = q[:, : k.shape[1], i, -1]
            else:
                k[:, :, j] = 0

    def __str__(self) -> str:
        given = {name: "x".join(map(str, t.shape)) for name, t in self.tensors.items()}
        extra = [self.blend] * bool(self.blend) + ["hype"] * self.hype + ["ties"] * self.ties
        return f"{'+'.join([self.score, *extra])} {self.shape} {self.dtype} x{self.magnitude} {self.options} {given}"

    def inputs(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """New leaves: features in this dtype, numbers of heads in float32 at least."""
        at_least = torch.float64 if dtype == torch.float64 else torch.float32
        return {
            name: t.to(dtype if name in ("query", "key", "value") else at_least).requires_grad_()
            for name, t in self.leaves.items()
        }

    def pair_score(self, x: dict[str, torch.Tensor]) -> PairScore:
        """The score of these inputs."""
        q, k = x["query"], x["key"]
        if self.blend or self.score != "dot":  # as layers and functions do it
            q, k = upcast_for_grad(q), upcast_for_grad(k)
        space, blended = self.space(self.score, x), self.space(self.blend, x)
        score = dot_score(q, k) if space is None else space.score(q, k)
        if self.blend:
            score = score.plus(*blended.score(q, k, q.shape[-1] ** -0.5, x["gate"]).terms)
        if self.hype:
            at = [torch.arange(t.shape[2], dtype=torch.float64)[None, None] for t in (q, k)]
            form = "sinh" if self.options["is_causal"] else "cosh"
            score = with_hype(score, tuple(at), x["mu"], x["tau"], form, None)
        return score

    def space(self, name: str | None, x: dict[str, torch.Tensor]):
        """Variant and parameters of a cone or hyperbolic score; None for others."""
        if name in CONES:
            return ConeSpace(*CONES[name], True, False, x["first"], x["second"])
        scale = x["query"].shape[-1] ** -0.5
        return HyperbolicSpace(name, scale, x["first"], x["second"]) if name in DISTANCES else None

    def option(self, x: dict[str, torch.Tensor]) -> Options:
        """The call's options for these inputs."""
        given = {name: t for name, t in self.tensors.items() if name != "sinks"}
        return Options(**self.options, **given, sinks=x.get("sinks"))
