"""Textbook formulas of hyperbolic space in 50 digits, one point at a time; none is used by the package.

All take sequences of numbers and a curvature -c. The arcosh forms are exact here because mpmath carries the digits
that they lose.
"""

from mpmath import mp, mpf

mp.dps = 50


def numbers(x):
    """A point as mpmath numbers; the float64 (or float32) value of every coordinate is taken exactly."""
    return [mpf(float(v)) for v in x]


def dot(x, y):
    return mp.fsum(a * b for a, b in zip(x, y, strict=True))


def poincare_distance(x, y, c):
    x, y, c = numbers(x), numbers(y), mpf(float(c))
    apart = [a - b for a, b in zip(x, y)]
    return mp.acosh(
        1 + 2 * c * dot(apart, apart) / ((1 - c * dot(x, x)) * (1 - c * dot(y, y)))
    ) / mp.sqrt(c)


def scattered(points, weights, at, c):
    """Σ w cosh(√c d(p, at)): what the Einstein midpoint minimises, up to a constant the squared Lorentz distances."""
    root = mp.sqrt(mpf(c))
    return mp.fsum(w * mp.cosh(root * poincare_distance(p, at, c)) for p, w in zip(points, weights))


def minimum(f, start, step=0.1, until=1e-10):
    """The minimum of a convex function of the plane, by a pattern search."""
    best, value = list(start), f(start)
    while step > until:
        tries = [
            [best[0] + dx * step, best[1] + dy * step]
            for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1))
        ]
        values = [f(t) for t in tries]
        if min(values) < value:
            value = min(values)
            best = tries[values.index(value)]
        else:
            step /= 2
    return best
