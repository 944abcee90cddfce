"""Fusion of heads inside a host: the heads' outputs, weighted for every token, before the output projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...fields import refuse
from ..base import Host, MechanismLayer, Plan
from .config import HeadFusionConfig
from .reference import head_weights


class HeadFusionLayer(MechanismLayer):
    """o_im <- M · beta_im · o_im, with beta a softmax over heads of what token i asks for.

    Parameters: `query_map` W [size, width], small seeded normal numbers at first, and per head `kappa` [heads, size]
    and `bias` [heads], both zero at first, which is the identity. Were W zero as well, neither it nor kappa would ever
    get a gradient. With `heads=` the chosen ones share the weights and the others are left as they are.

    Attributes:
        on_weights: called with beta [B, N, chosen heads] at every call; `analysis.heads` sets it.
        keep: from beta to a factor of the same shape that every chosen head is multiplied with; set there too.

    Raises:
        ValueError: nothing says how wide the hidden states are that enter the host, or `size` is above that width.
    """

    honours_heads = True
    reads_hidden = True
    mixes_heads = False  # all that it reads of others are hidden states
    for_all_heads = ("query_map", "kappa", "bias")

    def __init__(self, config: HeadFusionConfig, host: Host, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        if host.width is None:
            raise ValueError(
                f"head_fusion reads the hidden states that enter {host.name}, and nothing says how wide they are; "
                "allowed: hosts with a query projection, or whose config has hidden_size"
            )
        self.layer_index, self.count = host.layer_index, host.heads if heads is None else len(heads)
        size = config.size_for(host.heads)
        if (
            size > host.width
        ):  # before anything of that size is made: a record may come from a stranger
            refuse(
                "HeadFusionConfig.size",
                size,
                f"1 to {host.width}, the width of the hidden states of {host.name}",
            )
        self.query_map = nn.Parameter(torch.empty(size, host.width))
        self.kappa = nn.Parameter(torch.empty(self.count, size))
        self.bias = nn.Parameter(torch.empty(self.count))
        self.on_weights: Callable[[Tensor], None] | None = None
        self.keep: Callable[[Tensor], Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The query map at its seeded numbers, which differ between layers; zero for the rest."""
        generator = torch.Generator().manual_seed((self.config.seed + self.layer_index) % 2**63)
        drawn = torch.randn(
            self.query_map.shape, generator=generator, device="cpu", dtype=torch.float32
        )
        start = drawn * self.config.spread
        init.copy_(self.query_map, start.to(self.query_map))
        init.zeros_(self.kappa)
        init.zeros_(self.bias)

    def change(self, plan: Plan) -> Plan:
        hidden, rank = plan.call.hidden, plan.call.heads
        if hidden is None:
            raise ValueError(
                "head_fusion reads the hidden states that enter its host, and this call brought none; patch the model "
                "with patch_model"
            )
        beta = head_weights(hidden, self.query_map, self.kappa, self.bias)
        if self.on_weights is not None:
            self.on_weights(beta)
        factors = beta * self.count
        if self.keep is not None:
            factors = factors * self.keep(beta)
        if self.heads is not None:  # 1 for heads that are not chosen
            total = plan.call.query.shape[1] if rank is None else rank.total
            ones = factors.new_ones(*factors.shape[:-1], total)
            factors = ones.index_copy(-1, torch.tensor(self.heads, device=factors.device), factors)
        if rank is not None:
            factors = rank.slice_rank(factors, -1)
        by_head = factors.transpose(1, 2)[..., None]
        return plan.change(after=(*plan.after, lambda out: weigh(out, by_head)))

    def idle(self) -> bool:
        return self.on_weights is None and self.keep is None and super().idle()

    def identical(self) -> bool:
        return self.keep is None and not bool(self.kappa.any()) and not bool(self.bias.any())


def weigh(out: Tensor, factors: Tensor) -> Tensor:
    """The product of outputs [B, H, N, dv] and factors [B, H, N, 1]; in place where no gradient wants `out`."""
    factors = factors.to(out.dtype)
    learning = torch.is_grad_enabled() and (out.requires_grad or factors.requires_grad)
    if learning or torch.compiler.is_compiling():
        return out * factors
    return out.mul_(factors)
