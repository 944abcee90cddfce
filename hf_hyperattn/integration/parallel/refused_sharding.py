"""Raise for the kinds of sharding that added parameters and mechanisms do not support.

These are context parallelism, in which each rank has some tokens, and DeepSpeed's ZeRO-3, which
takes parameters away between layers.
"""

from __future__ import annotations

import sys

from torch import nn

#: Modules in which torch lists the functions that it replaced for context parallelism.
CONTEXT_PARALLEL = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)
#: Attribute that DeepSpeed's ZeRO-3 sets on modules whose parameters it partitions.
PARTITIONED = "ds_id"


def refuse_context_parallel(module: nn.Module) -> None:
    """Raise inside torch's `context_parallel`: each rank has some of the tokens.

    It only supports SDPA, whose function it replaces.

    Raises:
        ValueError: Context parallelism is active.
    """
    # Missing upstream: a public function that tells whether `context_parallel` is active.
    for name in CONTEXT_PARALLEL:
        replaced = getattr(sys.modules.get(name), "_replaced_functions", {})
        if nn.functional.scaled_dot_product_attention in replaced:
            raise ValueError(
                f"{type(module).__name__} was called within context parallelism (context_parallel, cp_size), which "
                "gives every rank some of the tokens, while mechanisms of hf_hyperattn need all of them; allowed: "
                "FSDP2 or tensor parallelism, or set_attn_implementation('sdpa') on a model that is not patched"
            )


def refuse_partitioned(hyper: nn.Module) -> None:
    """Raise under DeepSpeed's ZeRO-3.

    It empties parameters when their layer returns, and plans read them after that.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"attention patched with {' and '.join(hyper._modules)} was called under DeepSpeed ZeRO-3, which takes added "
        "parameters away while attention still reads them; allowed: zero_optimization.stage 1 or 2, or FSDP2"
    )
