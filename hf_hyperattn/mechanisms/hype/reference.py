"""Define HyPE, the hyperbolic positional bias, as published (arXiv 2310.19676).

Here you learn the formula of the bias; docs/hype.md derives it. i is the position of a query, j the
position of a key. Each head has its own μ and τ. The bias of a pair, which is added to its logit, is

    sinh, for causal attention:         τ · sinh(μ (j - i))              negative for the past
    cosh, for bidirectional attention:  -τ · (cosh(μ (i - j)) - 1)       negative on either side

For small distances, the sinh form is nearly τμ (j - i), which is ALiBi with slope τμ.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ...geometry.scalars import at_least, at_most

Form = Literal["sinh", "cosh"]
FORMS = get_args(Form)

#: Limit of |μ (j - i)|. The bias is then above 1e25 · τ, and still finite in float32.
FARTHEST = 60.0


def definition(
    query_positions: Tensor, key_positions: Tensor, mu: Tensor, tau: Tensor, form: str
) -> Tensor:
    """Return the dense bias [B, H, N, M].

    Args:
        query_positions: Positions [B, 1, N], in the dtype of the computation.
        key_positions: Positions [B, 1, M], likewise.
        mu, tau: Parameters [H] or [1].
        form: "sinh" or "cosh".
    """
    mu = mu[:, None, None]
    tau = tau[:, None, None]
    x = mu * (key_positions[..., None, :] - query_positions[..., :, None])
    x = at_most(at_least(x, -FARTHEST), FARTHEST)
    if form == "sinh":
        return tau * torch.sinh(x)
    # 1 - cosh x = -2 sinh²(x / 2), without the cancellation near 0.
    return -2 * tau * torch.sinh(x / 2) ** 2
