"""What the weights of heads cost in a real model: SmolLM2's forward pass, training step and decoding, over stock.

The weights are random, so that nothing is skipped. Beside every time stands how far the logits are from those of the
stock model whose heads are weighed by hooks on its output projections.

python benchmarks/head_fusion.py --lengths 128 512 2048 --json benchmarks/results/head_fusion-cpu.json
"""

from __future__ import annotations

import torch
import transformers
from common import environment, interleaved, options, ratios, write_json
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.analysis import record_heads
from hyperattn_cli.shared.smollm2 import smollm2

STOCK, PATCHED = "stock", "head_fusion"


def models() -> dict[str, torch.nn.Module]:
    """SmolLM2 as it is, and with weights of heads away from where they start."""
    found = {
        name: AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
        for name in (STOCK, PATCHED)
    }
    ha.patch_model(found[PATCHED], ha.HeadFusionConfig())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in found[PATCHED].named_parameters():
            if name.endswith((".kappa", "head_fusion.bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return found


def error(found: dict[str, torch.nn.Module], ids: torch.Tensor) -> float:
    """Largest difference of logits, over their largest, from the stock model with hooks that weigh its heads."""
    with torch.no_grad(), record_heads(found[PATCHED]) as record:
        ours = found[PATCHED](ids, use_cache=False).logits
    handles = []
    for name, (beta,) in record.calls.items():

        def hook(_, args, factors=beta * beta.shape[-1]):
            heads = args[0].unflatten(-1, (factors.shape[-1], -1))
            return ((heads * factors[..., None]).flatten(-2),)

        handles.append(found[STOCK].get_submodule(name).o_proj.register_forward_pre_hook(hook))
    with torch.no_grad():
        theirs = found[STOCK](ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


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
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found, where, rows = models(), environment(), []
    added = sum(p.numel() for n, p in found[PATCHED].named_parameters() if ".hyper." in n)
    print(
        f"{where['chip']}, {where['threads']} thread(s), torch {where['torch']}; SmolLM2 in float32, batch 1, "
        f"{added:,} parameters added"
    )
    print(f"{'length':>7} {'kind':10} {'x stock':>8} {'low':>6} {'high':>6} {'s':>8} {'error':>8}")
    for length in args.lengths:
        ids = torch.randint(1, 40000, (1, length), generator=torch.manual_seed(0))
        off = error(found, ids)
        for kind in args.kinds:
            runs = {name: calls(model, ids, kind) for name, model in found.items()}
            ratio = ratios(interleaved(runs, args.rounds), STOCK)[PATCHED]
            rows.append({"length": length, "kind": kind, **ratio, "error": off})
            print(
                f"{length:7d} {kind:10} {ratio['median']:8.3f} {ratio['low']:6.3f} {ratio['high']:6.3f} "
                f"{ratio['seconds']:8.3f} {off:8.1e}",
                flush=True,
            )
    write_json(
        args.json,
        {"environment": where, "arguments": vars(args), "parameters": added, "rows": rows},
    )


if __name__ == "__main__":
    main()
