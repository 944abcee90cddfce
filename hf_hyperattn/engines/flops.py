"""Tell FLOP counters how many operations the attention operators take.

The counts follow `torch.utils.flop_counter` for SDPA: only the products of attention count.
"""

from __future__ import annotations

from torch import Size
from torch.utils.flop_counter import register_flop_formula

from ..utils.torch_private import find_packet


def count_flops(operator, at: int = 0, backward: bool = False) -> None:
    """Register the FLOP formula of dense attention for an operator.

    Args:
        operator: Result of `torch.library.custom_op`.
        at: Index of the argument that holds queries [B, H, N, d], keys [B, Hkv, M, d] and values
            [B, Hkv, M, dv]. It is either the first of three arguments or one list that begins with
            the three. Default: the first argument.
        backward: Whether the operator computes the gradients. Default: it computes the output.
    """

    def count_products(*arguments, out_shape=None, **_) -> int:
        shapes = arguments[at : at + 3] if isinstance(arguments[at], Size) else arguments[at][:3]
        query, key, value = shapes
        batch, heads, queries, width = query
        pairs = batch * heads * queries * key[2]
        # Forward: Q·K and W·V. Backward: Q·K again, then the gradients of W, V, Q and K; three of
        # the five have width d.
        numbers = 3 * width + 2 * value[-1] if backward else width + value[-1]
        return 2 * pairs * numbers

    register_flop_formula(find_packet(operator))(count_products)
