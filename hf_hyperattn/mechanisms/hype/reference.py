"""HyPE, hyperbolic positional encoding: the definition (arXiv 2310.19676; math in docs/hype.md).

With i the position of a query and j that of a key, and mu and tau per head, what is added to the logit of a pair is

    sinh, for causal attention:         τ · sinh(μ (j - i))              negative for the past
    cosh, for bidirectional attention:  -τ · (cosh(μ (i - j)) - 1)       negative on either side

Near the query both are almost as straight, or as flat, as their first term: τμ (j - i) is ALiBi with slope τμ.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ...geometry.scalars import at_least, at_most

Form = Literal["sinh", "cosh"]
FORMS = get_args(Form)

#: |μ (j - i)| is cut here: the bias is then beyond 1e25 times τ, and stays finite in float32.
FARTHEST = 60.0


def definition(
    query_positions: Tensor, key_positions: Tensor, mu: Tensor, tau: Tensor, form: str
) -> Tensor:
    """The dense bias [B, H, N, M].

    Args:
        query_positions: [B, 1, N], in the dtype to compute in.
        key_positions: [B, 1, M].
        mu, tau: [H] or [1].
        form: "sinh" or "cosh".
    """
    mu, tau = mu[:, None, None], tau[:, None, None]
    x = mu * (key_positions[..., None, :] - query_positions[..., :, None])
    x = at_most(at_least(x, -FARTHEST), FARTHEST)
    if form == "sinh":
        return tau * torch.sinh(x)
    return -2 * tau * torch.sinh(x / 2) ** 2  # cosh x - 1 without its cancellation near 0
