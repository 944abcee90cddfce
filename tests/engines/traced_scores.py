"""The package's own scores as plain arithmetic, for the engine that writes its functors from that (test_trace.py).

Each is a function of one line or a few, where the functors by hand have a page with the derivative in it. Statistics
and features are made here, so that nothing but the arithmetic is shared with the code that they are compared with.
"""

import torch
from torch import maximum, minimum, sqrt, where

import hf_hyperattn as ha
from hf_hyperattn.engines import DistanceTerm, PairScore, Points, ScoreTerm, Term
from hf_hyperattn.engines.score import TERMS, repeat_heads
from hf_hyperattn.mechanisms.cone.reference import height_and_stretch, horizontal
from hf_hyperattn.mechanisms.hyperbolic.reference import direction_and_norm, half_radius

F = ha.functional
EPS = 2.0**-23


class Cone(DistanceTerm):
    """|X_q - X_k|²: inexact by the product where it is small beside |X_q|², more so where D² is large."""

    def __init__(self, name, formula, own, on_product):
        self.name, self.formula, self.own, self.left_out = f"traced_{name}", formula, own, int(on_product)
        self.rows, self.heads = own + 1 + 2 * on_product, own
        self.columns = self.rows

    def by_product(self, dot, row, column, head):
        norms, own = row[self.own] + column[self.own], self.own + 1
        if not self.left_out:
            return norms - 2 * dot
        return norms - 2 * (dot - row[own + 1] * column[own + 1]) * (row[own] * column[own])

    def is_inexact(self, squared, row, column, head):
        size, own = row[self.own], self.own + 1
        if self.left_out:
            size = size + (row[own + 1] * column[own + 1] * (row[own] * column[own])).abs()
        return squared < size * (1.42e-6 * head[-1] * size).clamp(1e-3, 1 / 16)

    def factors(self, row, column, head):
        return (row[self.own + 1], column[self.own + 1]) if self.left_out else (1.0, 1.0)

    def score(self, *numbers):
        return self.formula(*numbers)


def umbral(dot, row, column, head, squared):
    u, distance = row[0] - column[0], squared * head[0]
    return -(row[0] + column[0] + sqrt(where(distance <= u * u, u * u, distance)))  # NaN stays


def penumbral(dot, row, column, head, squared):
    (pq, a), (pk, b), gap = row[:2], column[:2], (squared * head[1]).clamp_min(1e-30)
    half, difference = 0.5 * (a + b - where(squared <= 0, 0.0, sqrt(gap))), pk - pq
    apart = 0.25 * (gap + 2 * (pq + pk) + difference * (difference / gap))
    inside = where(half >= minimum(a, b), maximum(pq, pk), head[0] - half * half)  # NaN stays
    return -where(half < 0, apart, inside)


def penumbral_unsquared(dot, row, column, head, squared):
    return -sqrt((-penumbral(dot, row, column, head, squared)).clamp_min(1e-12))


def half_sinh_squared(row, column, opening):
    """w = sinh² of half the distance; what rounding leaves of it for coinciding points steers no gradient."""
    x = (row[0] - column[0]) * column[1] - (row[1] - column[1]) * column[0]
    p = (row[0] * row[1]) * (column[0] * column[1])
    w = opening * p + x * x
    return where(w <= 256 * EPS**2 * p, w.detach(), w), p


def geodesic(dot, row, column, head, opening):
    return -head[0] * torch.acosh(1 + 2 * half_sinh_squared(row, column, opening)[0])


def squared_lorentz(dot, row, column, head, opening):
    return -head[0] * half_sinh_squared(row, column, opening)[0]


class Hyperbolic(DistanceTerm):
    """|q/|q| - k/|k||² from the product or from differences; with the statistics of directions, or of the product."""

    heads = 1

    def __init__(self, name, formula, on_product):
        self.name, self.formula, self.on_product = f"traced_{name}", formula, on_product
        self.rows = self.columns = 2 + on_product

    def by_product(self, dot, row, column, head):
        return (2 - 2 * (dot * column[2] * row[2] if self.on_product else dot)).clamp_min(0.0)

    def is_inexact(self, opening, row, column, head):
        w, p = half_sinh_squared(row, column, opening)
        noise = 4 * EPS * p
        if self.formula is squared_lorentz:
            return (head[0] * noise > 2e-4) & (noise > 1e-5 * w)
        y = 2 * w
        return (head[0] * noise > 1e-4 * sqrt(y * (y + 2))) | (w < 2048 * noise)

    def factors(self, row, column, head):
        return (row[2], column[2]) if self.on_product else (1.0, 1.0)

    def score(self, *numbers):
        return self.formula(*numbers)


class Hype(Term):
    rows, columns, heads = 1, 1, 2

    def __init__(self, form):
        self.name, self.form = f"traced_hype_{form}", form

    def logits(self, dot, row, column, head, squared_distance=None):
        x = ((column[0] - row[0]).detach() * head[0]).clamp(-60, 60)
        return head[1] * (torch.sinh(x) if self.form == "sinh" else -2 * torch.sinh(0.5 * x) ** 2)


def _terms():
    for end, on_product in (("", False), ("_on_product", True)):
        yield Cone("umbral" + end, umbral, 1, on_product)
        yield Cone("penumbral_squared" + end, penumbral, 2, on_product)
        yield Cone("penumbral" + end, penumbral_unsquared, 2, on_product)
        yield Hyperbolic("geodesic" + end, geodesic, on_product)
        yield Hyperbolic("squared_lorentz" + end, squared_lorentz, on_product)
    yield from (Hype("sinh"), Hype("cosh"))


OWN = {t.name: TERMS.setdefault(t.name, t) for t in _terms()}


def cone_parts(q, k, gamma, radius, name, scale):
    """Features, statistics and parameters of a cone score; on the product of `scale` · q and k where that is given."""
    is_umbral = name == "umbral"
    mapping = "xi" if is_umbral else "psi"
    weight = gamma / 2 if is_umbral else gamma.sqrt() if name == "penumbral_squared" else gamma
    factors = (weight, weight / torch.sinh(radius)) if is_umbral else (weight * radius, weight * radius)
    statistics, features = [], []
    for x, by in ((q, scale), (k, 1.0)):
        height, stretch = height_and_stretch(x, mapping)
        far = horizontal(x, stretch)
        h = repeat_heads(height, q.shape[1]) * factors[0][:, None]
        own = (h,)
        if not is_umbral:
            square = ((weight * radius) ** 2)[:, None]
            own = h**2, torch.sqrt(maximum(square - h**2, 1e-6 * square))
        more = () if scale is None else (stretch / by, x[..., -1] * by)
        statistics.append((*own, far.square().sum(-1), *more))
        features.append(far if scale is None else x * by)
    head = (factors[1] ** 2,) if is_umbral else ((weight * radius) ** 2, factors[1] ** 2)
    return features, statistics, head


def hyperbolic_parts(q, k, curvature, temperature, name, scale):
    """The same of a hyperbolic score; vectors are scaled by 1/sqrt(d)."""
    statistics, features, unit = [], [], q.shape[-1] ** -0.5
    for x, by in ((q, scale), (k, 1.0)):
        direction, norm = direction_and_norm(x, unit)
        a = half_radius(repeat_heads(norm, q.shape[1]), curvature[:, None])
        more = () if scale is None else (unit / (by * norm),)
        statistics.append((torch.sinh(a), torch.cosh(a), *more))
        features.append(direction if scale is None else x * by)
    root = curvature.sqrt()
    beta = 1 / (temperature * root) if name == "geodesic" else 4 / (curvature * temperature)
    return features, statistics, (beta,)


def own_score(name, q, k, first, second, blend=None):
    """A score of the package with a traced term: alone, or with `blend` [H] beside the host's product.

    Args:
        name: a term's, without "traced_" and "_on_product".
        first, second: gamma and radius, curvature and temperature, or mu and tau, [H] each.
    """
    scale = None if blend is None else q.shape[-1] ** -0.5
    if name.startswith("hype"):
        places = [torch.arange(x.shape[2], dtype=q.dtype).expand(x.shape[:3]) for x in (q, k)]
        features, statistics, head = (q * scale, k), [(place,) for place in places], (first, second)
    else:
        parts = hyperbolic_parts if name in ("geodesic", "squared_lorentz") else cone_parts
        features, statistics, head = parts(q, k, first, second, name, scale)
    alone = blend is None
    end = "" if alone or name.startswith("hype") else "_on_product"
    term = OWN[f"traced_{name}{end}"]

    def points():
        factors = term.factors(statistics[0], statistics[1], head)
        far = [x[..., : x.shape[-1] - term.left_out] for x in features]
        far = [x if alone else repeat_heads(x, f.shape[1]) * f[..., None] for x, f in zip(far, factors, strict=True)]
        return Points(*far)

    measures = points if isinstance(term, DistanceTerm) else None
    own = ScoreTerm(term, lambda: None, *statistics, head, gate=blend, points=measures)
    return PairScore(*features, (own,) if alone else (ScoreTerm(TERMS["dot"], lambda: None), own))


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
            q, k, variant=variant, mapping=mapping, gamma=first, radius=second,
            squared=name != "penumbral", clamp_heights=False,
        )  # fmt: skip
    if blend is None:
        return logits
    far = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q @ far.mT * q.shape[-1] ** -0.5 + blend[:, None, None] * logits
