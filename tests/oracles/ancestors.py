"""Lowest common ancestors by search, from the geometry of shadows rather than from the closed forms.

Half space, light from above. Umbral: an object is a hyperbolic ball of radius r, which is the Euclidean ball
of radius h·sinh r; another object descends from it if its ball lies wholly in the vertical shadow. Penumbral:
an object is a point, light comes from the horosphere at height r, and a descendant lies under the half circle
of Euclidean radius r that runs down from the ancestor towards it. (Shadow Cones, arXiv 2305.15215.)
"""

import math


def umbral_descends(apex, leaf, radius):
    """True if the ball round `leaf` lies in the shadow of the ball round `apex`; points are (X, h)."""
    (xa, ha), (xl, hl) = apex, leaf
    return ha >= hl and math.dist(xa, xl) + hl * math.sinh(radius) <= ha * math.sinh(radius)


def penumbral_descends(apex, leaf, radius):
    """True if `leaf` lies under the half circle of radius `radius` that runs down from `apex` on its side."""
    (xa, ha), (xl, hl) = apex, leaf
    foot = math.sqrt(
        max(radius**2 - ha**2, 0.0)
    )  # the circle's centre lies this far behind the apex
    return ha >= hl and (math.dist(xa, xl) + foot) ** 2 + hl**2 <= radius**2


def lowest_apex(p, q, descends, radius, ceiling):
    """Least height of a common ancestor of p and q, by grid search over its place; None if there is none."""
    centre, span, best = (
        [(a + b) / 2 for a, b in zip(p[0], q[0], strict=True)],
        math.dist(p[0], q[0]),
        None,
    )
    along = [
        (b - a) / span for a, b in zip(p[0], q[0], strict=True)
    ]  # grid axes: along the pair, and across
    for _ in range(20):
        found = []
        for u in range(-4, 5):
            for w in range(-2, 3):
                u_step, w_step = u * span / 4, w * span / 4
                spot = [
                    centre[0] + u_step * along[0] - w_step * along[1],
                    centre[1] + u_step * along[1] + w_step * along[0],
                ]
                height = _lowest_at(spot, p, q, descends, radius, ceiling)
                if height is not None:
                    found.append((height, spot))
        if found:
            best, centre = min(found)
        elif best is None and span < 1e-6:
            return None
        span *= 0.5
    return best


def _lowest_at(spot, p, q, descends, radius, ceiling):
    low, high = 0.0, ceiling
    if not (descends((spot, high), p, radius) and descends((spot, high), q, radius)):
        return None
    for _ in range(50):
        middle = (low + high) / 2
        both = descends((spot, middle), p, radius) and descends((spot, middle), q, radius)
        low, high = (low, middle) if both else (middle, high)
    return high


def geodesic_apex(p, q):
    """Height of the top of the half circle, centred on the boundary, that passes through p and q."""
    d = math.dist(p[0], q[0])
    low, high = (
        -1e6,
        1e6,
    )  # centre, measured from p towards q; the nearer it is to q, the larger the gap
    for _ in range(200):
        middle = (low + high) / 2
        gap = math.hypot(middle, p[1]) - math.hypot(d - middle, q[1])
        low, high = (middle, high) if gap < 0 else (low, middle)
    return math.hypot(low, p[1])
