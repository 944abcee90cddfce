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
    return mp.acosh(1 + 2 * c * dot(apart, apart) / ((1 - c * dot(x, x)) * (1 - c * dot(y, y)))) / mp.sqrt(c)


def klein_distance(k, l, c):
    k, l, c = numbers(k), numbers(l), mpf(float(c))
    cosh = (1 - c * dot(k, l)) / mp.sqrt((1 - c * dot(k, k)) * (1 - c * dot(l, l)))
    return mp.acosh(max(cosh, mpf(1))) / mp.sqrt(c)


def lorentz_distance(x, y, c):
    """arcosh of -c⟨x,y⟩_L, the time coordinates taken from the hyperboloid's equation."""
    c = mpf(float(c))
    x, y = numbers(x[1:]), numbers(y[1:])
    time = mp.sqrt((1 / c + dot(x, x)) * (1 / c + dot(y, y)))
    return mp.acosh(max(c * (time - dot(x, y)), mpf(1))) / mp.sqrt(c)


def halfspace_distance(p, q, c):
    p, q = numbers(p), numbers(q)
    apart = [a - b for a, b in zip(p, q)]
    return mp.acosh(1 + dot(apart, apart) / (2 * p[-1] * q[-1])) / mp.sqrt(mpf(float(c)))


def scattered(distance, points, weights, at, c):
    """Σ w cosh(√c d(p, at)): what the Einstein midpoint minimises, up to a constant the squared Lorentz distances."""
    return mp.fsum(w * mp.cosh(mp.sqrt(mpf(c)) * distance(p, at, c)) for p, w in zip(points, weights))


def minimum(f, start, step=0.1, until=1e-10):
    """The minimum of a convex function of the plane, by a pattern search."""
    best, value = list(start), f(start)
    while step > until:
        tries = [[best[0] + dx * step, best[1] + dy * step] for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1))]
        values = [f(t) for t in tries]
        if min(values) < value:
            value = min(values)
            best = tries[values.index(value)]
        else:
            step /= 2
    return best
