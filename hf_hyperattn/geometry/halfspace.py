"""The half space of curvature -c: points (X, h) with height h > 0, the last of their d coordinates.

The metric is (|dX|² + dh²) / (c h²), so coordinates are the same at every c > 0; (0, 1) is the origin. Cone attention
has its own maps from head vectors into this space, in its room.
"""

from __future__ import annotations

from torch import Tensor

from .scalars import asinhc, norm, root, working


def distance(p: Tensor, q: Tensor, c: Tensor | float) -> Tensor:
    """d = (2/√c) asinh(|p - q| / (2√(h_p h_q))), [...], of points p and q [..., d], h > 0."""
    p, q, c = working(c, p, q)
    half = norm(p - q) / (p[..., -1] * q[..., -1]).sqrt() / 2
    return 2 * half * asinhc(half.square()) / root(c)
