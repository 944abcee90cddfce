"""HAT against the encoder that it is made from with full attention: time of a call as a ratio, and peak extra memory.

Both have MiniLM's sizes and random weights; the encoder has positions for the longest text. The error beside HAT is
that to its float64 copy with eager attention, that beside the layout without cross-segment blocks is to the encoder
itself, run on the segments as texts of their own.

python benchmarks/hat.py --json benchmarks/results/hat.json
"""

from __future__ import annotations

import argparse
import copy
import ctypes

import torch
from common import environment, interleaved, ratios, write_json
from transformers import BertConfig, BertModel

from hf_hyperattn import HatConfig, convert
from hf_hyperattn.analysis.cost import PeakMemory
from hf_hyperattn.mechanisms.hat.segments import split_batch

FULL = "full attention"
#: MiniLM's sizes.
SIZES = dict(
    vocab_size=30522,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=1536,
)
PLAIN = "S S S S S S"


def models(args) -> dict[str, torch.nn.Module]:
    """The encoder, and what it is converted to."""
    torch.manual_seed(0)
    encoder = BertModel(BertConfig(**SIZES, max_position_embeddings=max(args.lengths))).eval()
    ways = {f"HAT {layout}": layout for layout in args.layouts} | {"no cross blocks": PLAIN}
    made = {
        name: convert(encoder, HatConfig(segment_length=args.segment_length, layout=layout))
        for name, layout in ways.items()
    }
    return {FULL: encoder, **made}


@torch.no_grad()
def error(name: str, given: dict[str, torch.nn.Module], ids: torch.Tensor, length: int) -> float:
    """The largest difference to another way of computing the same."""
    found = given[name](ids).last_hidden_state
    if name == "no cross blocks":
        parts = split_batch(torch.ones_like(ids, dtype=torch.bool), length)
        alone = given[FULL](
            parts.to_segments(ids), attention_mask=parts.filled.long()
        ).last_hidden_state
        return (parts.to_tokens(alone) - found).abs().max().item()
    exact = copy.deepcopy(given[name]).double()
    exact.set_attn_implementation("eager")
    return (exact(ids).last_hidden_state - found).abs().max().item()


def give_back_memory() -> None:
    """Return what the allocator keeps, where it can be told to, so that what the next call takes shows."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        pass


def calls(given: dict[str, torch.nn.Module], ids: torch.Tensor, kind: str) -> dict:
    """What is timed, as functions of no arguments."""

    def forward(model):
        with torch.no_grad():
            model(ids)

    def both(model):
        model(ids).last_hidden_state.mean().backward()
        model.zero_grad()

    run = forward if kind == "forward" else both
    return {name: lambda model=model: run(model) for name, model in given.items()}


def measure(length: int, given: dict[str, torch.nn.Module], args) -> list[dict]:
    """Rows of the table for one length."""
    ids = torch.randint(
        1000, 30000, (args.batch, length), generator=torch.Generator().manual_seed(length)
    )
    rows = []
    for kind in ("forward", "forward+backward"):
        if kind != "forward" and length > args.backward_up_to:
            continue
        runs = calls(given, ids, kind)
        for name, ratio in ratios(interleaved(runs, args.rounds), FULL).items():
            give_back_memory()
            with PeakMemory(interval=0.001) as memory:
                runs[name]()
            checked = kind == "forward" and length <= args.check_up_to
            wrong = error(name, given, ids, args.segment_length) if checked else None
            rows.append(
                {
                    "length": length,
                    "what": name,
                    "kind": kind,
                    **ratio,
                    "extra_mib": memory.added / 2**20,
                    "error": wrong,
                }
            )
    return rows


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--layouts", nargs="+", default=["I1", "I3"])
    parser.add_argument("--segment-length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--backward-up-to", type=int, default=1024, help="longest text with a backward pass"
    )
    parser.add_argument("--check-up-to", type=int, default=2048, help="longest text with an error")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    where, given, found = environment(), models(args), []
    print(
        f"{where['chip']}, {where['threads']} thread(s), torch {where['torch']}; float32, {args.batch} text(s), "
        f"MiniLM's sizes, segments of {args.segment_length}"
    )
    print(
        f"{'length':>7} {'what':15} {'kind':17} {'x full':>7} {'low':>6} {'high':>6} {'s':>8} {'MiB':>6} error"
    )
    for length in args.lengths:
        for r in measure(length, given, args):
            found.append(r)
            wrong = "" if r["error"] is None else f"{r['error']:.1e}"
            print(
                f"{r['length']:7d} {r['what']:15} {r['kind']:17} {r['median']:7.2f} {r['low']:6.2f} {r['high']:6.2f} "
                f"{r['seconds']:8.3f} {r['extra_mib']:6.0f} {wrong}",
                flush=True,
            )
    write_json(args.json, {"environment": where, "arguments": vars(args), "rows": found})


if __name__ == "__main__":
    main()
