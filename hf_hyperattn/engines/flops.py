"""FLOPs of the operators, as `torch.utils.flop_counter` counts those of SDPA: what the products of attention take."""

from __future__ import annotations

from torch import Size
from torch.utils.flop_counter import register_flop_formula


def count_flops(operator, at: int = 0, backward: bool = False) -> None:
    """Let FLOP counters know an operator of dense attention.

    Args:
        operator: what `torch.library.custom_op` made.
        at: where its queries [B, H, N, d], keys [B, Hkv, M, d] and values [B, Hkv, M, dv] stand among its arguments:
            the first of three arguments, or one list that begins with the three.
        backward: whether it computes the gradients: five products in place of two.
    """

    def flops(*arguments, out_shape=None, **_) -> int:
        shapes = arguments[at : at + 3] if isinstance(arguments[at], Size) else arguments[at][:3]
        (batch, heads, queries, width), (_, _, keys, _), (*_, value_width) = shapes
        numbers = 3 * width + 2 * value_width if backward else width + value_width
        return 2 * batch * heads * queries * keys * numbers

    register_flop_formula(operator._opoverload._overloadpacket)(flops)
