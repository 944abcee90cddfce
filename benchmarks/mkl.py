"""What multiple kernel learning costs in a real model: SmolLM2's forward pass, training step and decoding, over stock.

The weights of heads are random, so that nothing is skipped. Beside every time stands how far the logits are, over their
largest, from the same model on the definition: dense logits, weighted as the formula says.

python benchmarks/mkl.py --lengths 128 512 2048 --json benchmarks/results/mkl-cpu.json
"""

from __future__ import annotations

import torch
import transformers
from common import environment, interleaved, options, ratios, write_json
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.engines import dispatch
from hf_hyperattn.mechanisms.mkl import MklConfig
from hyperattn_cli.shared.smollm2 import smollm2

STOCK = "stock"
WAYS = {
    "global": (MklConfig(), "blend"),
    "conditional": (MklConfig(kind="conditional"), "blend"),
    "combined": (MklConfig(combine=True), "replace"),
    "cond. combined": (MklConfig(kind="conditional", combine=True), "replace"),
}


def models(ways: list[str]) -> dict[str, torch.nn.Module]:
    """SmolLM2 as it is, and with weights of heads away from where they start."""
    load = lambda: AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
    found = {STOCK: load()}
    generator = torch.Generator().manual_seed(0)
    for way in ways:
        config, mode = WAYS[way]
        found[way] = ha.patch_model(load(), config, mode=mode)
        with torch.no_grad():
            for name, parameter in found[way].named_parameters():
                if ".hyper." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return found


@torch.no_grad()
def error(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Largest difference of logits, over their largest, from the definition."""
    ours = model(ids, use_cache=False).logits
    chosen, dispatch.choose_engine = dispatch.choose_engine, lambda *_: "reference"
    try:
        exact = model(ids, use_cache=False).logits
    finally:
        dispatch.choose_engine = chosen
    return ((ours - exact).abs().max() / exact.abs().max()).item()


def calls(model: torch.nn.Module, ids: torch.Tensor, kind: str):
    """What is timed: a forward pass, a forward and backward pass, or 8 tokens each decoded after the ids."""
    if kind == "training":
        return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if kind == "forward":
        return torch.no_grad()(lambda: model(ids, use_cache=False))
    cache = torch.no_grad()(lambda: model(ids).past_key_values)()

    def decode():
        for _ in range(8):
            model(ids[:, -1:], past_key_values=cache)
            cache.crop(-1)

    return torch.no_grad()(decode)


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = options(__doc__, [128, 512, 2048], rounds=7)
    parser.add_argument("--kinds", nargs="+", default=["forward", "training", "decoding"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found, where, rows = models(args.ways), environment(), []
    print(
        f"{where['chip']}, {where['threads']} thread(s), torch {where['torch']}; SmolLM2 in float32, batch 1"
    )
    print(
        f"{'length':>7} {'kind':10} {'what':15} {'x stock':>8} {'low':>6} {'high':>6} {'s':>8} {'error':>8}"
    )
    for length in args.lengths:
        ids = torch.randint(1, 40000, (1, length), generator=torch.manual_seed(0))
        off = {name: error(model, ids) for name, model in found.items()}
        for kind in args.kinds:
            runs = {name: calls(model, ids, kind) for name, model in found.items()}
            for name, ratio in ratios(interleaved(runs, args.rounds), STOCK).items():
                if name == STOCK:
                    continue
                rows.append(
                    {"length": length, "kind": kind, "what": name, **ratio, "error": off[name]}
                )
                print(
                    f"{length:7d} {kind:10} {name:15} {ratio['median']:8.3f} {ratio['low']:6.3f} "
                    f"{ratio['high']:6.3f} {ratio['seconds']:8.3f} {off[name]:8.1e}",
                    flush=True,
                )
    write_json(args.json, {"environment": where, "arguments": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
