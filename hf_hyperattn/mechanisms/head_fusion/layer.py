"""Head fusion in an attention layer: weight the heads' outputs for every token.

The weights are multiplied in before the output projection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...config.fields import refuse
from ..base import Host, MechanismLayer, Plan
from .config import HeadFusionConfig
from .reference import head_weights


class HeadFusionLayer(MechanismLayer):
    """Compute o_im <- M · beta_im · o_im, where beta is a softmax over heads.

    Parameters: `query_map` W [size, width], seeded small normal numbers; per head `kappa` [heads,
    size] and `bias` [heads], initialised to zero, which is the identity. If W were zero too,
    neither W nor kappa would ever get a gradient. With `heads=`, the chosen heads share the weights
    and the others are unchanged.

    Attributes:
        on_weights: Called with beta [B, N, chosen heads] in every call; `analysis.heads` sets it.
        keep: Maps beta to a factor of the same shape for every chosen head; `analysis.heads` sets
            it.

    Raises:
        ValueError: The width of the layer's hidden states is unknown, or smaller than `size`.
    """

    honours_heads = True
    reads_hidden = True
    mixes_queries = False
    mixes_heads = False  # it reads hidden states, but no output of another head
    for_all_heads = ("query_map", "kappa", "bias")

    def __init__(self, config: HeadFusionConfig, host: Host, mode: str = "replace", heads=None):
        super().__init__(config, host, mode, heads)
        if host.width is None:
            raise ValueError(
                f"head_fusion reads the hidden states that enter {host.name}, and nothing says how wide they are; "
                "allowed: hosts with a query projection, or whose config has hidden_size"
            )
        self.layer_index = host.layer_index
        self.count = host.heads if heads is None else len(heads)
        size = config.size_for(host.heads)
        # Check before allocating: a config may come from a stranger and name any size.
        if size > host.width:
            allowed = f"1 to {host.width}, the width of the hidden states of {host.name}"
            refuse("HeadFusionConfig.size", size, allowed)
        self.query_map = nn.Parameter(torch.empty(size, host.width))
        self.kappa = nn.Parameter(torch.empty(self.count, size))
        self.bias = nn.Parameter(torch.empty(self.count))
        # Hooks of the analysis; None in ordinary use.
        self.on_weights: Callable[[Tensor], None] | None = None
        self.keep: Callable[[Tensor], Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the query map with seeded numbers, and the rest with zero."""
        # The seed differs between layers. Numbers are drawn on the CPU in float32, so that they do
        # not depend on device or dtype.
        generator = torch.Generator().manual_seed((self.config.seed + self.layer_index) % 2**63)
        drawn = torch.randn(
            self.query_map.shape, generator=generator, device="cpu", dtype=torch.float32
        )
        start = drawn * self.config.spread
        init.copy_(self.query_map, start.to(self.query_map))
        init.zeros_(self.kappa)
        init.zeros_(self.bias)

    def change(self, plan: Plan) -> Plan:
        hidden = plan.call.hidden
        rank = plan.call.heads
        if hidden is None:
            raise ValueError(
                "head_fusion reads the hidden states that enter its host, and this call brought none; patch the model "
                "with patch_model"
            )
        beta = head_weights(hidden, self.query_map, self.kappa, self.bias)
        if self.on_weights is not None:
            self.on_weights(beta)
        # M · beta is 1 for equal weights, so the initial output is unchanged.
        factors = beta * self.count
        if self.keep is not None:
            factors = factors * self.keep(beta)
        # Heads that are not chosen have the factor 1.
        if self.heads is not None:
            ones = factors.new_ones(*factors.shape[:-1], plan.call.total_heads)
            factors = ones.index_copy(-1, torch.tensor(self.heads, device=factors.device), factors)
        # With tensor parallelism, this process has only some of the heads.
        if rank is not None:
            factors = rank.slice_rank(factors, -1)
        # From [B, N, M] to the layout of the outputs, [B, M, N, 1].
        by_head = factors.transpose(1, 2)[..., None]
        return plan.change(after=(*plan.after, lambda out: weigh_outputs(out, by_head)))

    def idle(self) -> bool:
        return self.on_weights is None and self.keep is None and super().idle()

    def identical(self) -> bool:
        return self.keep is None and not bool(self.kappa.any()) and not bool(self.bias.any())


def weigh_outputs(out: Tensor, factors: Tensor) -> Tensor:
    """Multiply outputs [B, H, N, dv] by factors [B, H, N, 1].

    It works in place if no gradient needs `out`.
    """
    # The softmax is computed in float32, the output keeps its dtype.
    factors = factors.to(out.dtype)
    learning = torch.is_grad_enabled() and (out.requires_grad or factors.requires_grad)
    # A compiler sees functional operators only, and reuses the memory itself.
    if learning or torch.compiler.is_compiling():
        return out * factors
    return out.mul_(factors)
