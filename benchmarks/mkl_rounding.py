"""Where multiple kernel learning differs from its definition in a real model: rounding, or an error?

SmolLM2's logits with random weights of heads, over the largest of them, against the definition (dense logits, weighted
as the formula says) in float64. In float64 the blockwise engine does the same in finer arithmetic: an error would stay,
rounding goes. In "rounded", the definition in float64, nothing is inexact but that every attention's output is rounded
to float32 once: what is left is how far the model carries a rounding. "stock" is the model as it is: SDPA, for the
definition in float32 eager attention, in float64 SDPA again.

python benchmarks/mkl_rounding.py --lengths 128 512 --json benchmarks/results/mkl-rounding.json
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import transformers
from common import environment, options, write_json
from mkl import STOCK, models

from hf_hyperattn.engines import dispatch

COLUMNS = {
    "auto, float32": "auto_32",
    "blockwise, float32": "blockwise_32",
    "definition, float32": "definition_32",
    "blockwise, float64": "blockwise_64",
    "rounded": "rounded",
}


@contextmanager
def engine(name: str):
    """Everything on one engine; its way is that of `dispatch.choose_engine`."""
    chosen, dispatch.choose_engine = dispatch.choose_engine, lambda *_: name
    try:
        yield
    finally:
        dispatch.choose_engine = chosen


@contextmanager
def rounded(model: torch.nn.Module):
    """What attention gives is rounded to float32 before the output projection."""
    through = lambda _, inputs: (inputs[0].float().to(inputs[0].dtype), *inputs[1:])
    with ExitStack() as stack:
        for layer in model.model.layers:
            stack.callback(layer.self_attn.o_proj.register_forward_pre_hook(through).remove)
        yield


def in_float64(model: torch.nn.Module) -> None:
    """The model in float64, its norms too, which otherwise round to float32 in any dtype."""
    model.double()
    for norm in (m for m in model.modules() if type(m).__name__.endswith("RMSNorm")):
        norm.forward = partial(rms_norm, weight=norm.weight, eps=norm.variance_epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm over a row's last axis, times a weight."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


@torch.no_grad()
def errors(model: torch.nn.Module, ids: torch.Tensor, stock: bool) -> dict[str, float]:
    """Every column; the model comes in float32 and is left in float64."""
    logits = lambda: model(ids, use_cache=False).logits.double()
    found = {"auto_32": logits()}
    with engine("blockwise"):
        found["blockwise_32"] = logits()
    model.set_attn_implementation("eager") if stock else None
    with engine("reference"):
        found["definition_32"] = logits()
    model.set_attn_implementation("sdpa") if stock else None
    in_float64(model)
    with engine("blockwise"):
        found["blockwise_64"] = logits()
    with engine("reference"), rounded(model):
        found["rounded"] = logits()
    with engine("reference"):
        exact = logits()
    return {name: ((x - exact).abs().max() / exact.abs().max()).item() for name, x in found.items()}


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = options(__doc__, [128, 512], rounds=1)
    parser.add_argument("--ways", nargs="+", default=[STOCK, "global", "conditional", "combined"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    print(f"{'length':>7} {'what':15} " + " ".join(f"{column:>20}" for column in COLUMNS))
    for length in args.lengths:
        ids = torch.randint(1, 40000, (1, length), generator=torch.manual_seed(0))
        for way in args.ways:
            found = errors(models([way] if way != STOCK else [])[way], ids, way == STOCK)
            rows.append({"length": length, "what": way, **found})
            print(
                f"{length:7d} {way:15} " + " ".join(f"{found[c]:20.1e}" for c in COLUMNS.values()),
                flush=True,
            )
    write_json(args.json, {"environment": environment(), "arguments": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
