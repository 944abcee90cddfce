"""How much of a model call goes into reading its mask: where tokens stand, what is padding, which texts there are.

    python benchmarks/places.py --length 2048

All layers share one reading (hf_hyperattn/mechanisms/selection/places.py). Printed are how many readings a call made,
and the time in them over the time of the call, for a prompt and for one generated token. The model has the shape of
SmolLM2-135M and random weights; one row is padded at its left.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers as hf
from common import cpu

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.selection.places import Reading
from hf_hyperattn.rules import Pages


class Clock:
    """Counts the readings of a call, and the time in them."""

    def __init__(self):
        self.seconds, self.places, self.depth, self.remember = 0.0, 0, 0, Reading.read_once

    def __enter__(self):
        clock = self

        def remember(reading, name, read):
            started = time.perf_counter()
            clock.places += name == "places" and name not in reading.facts
            clock.depth += 1
            try:
                return clock.remember(reading, name, read)
            finally:
                clock.depth -= 1
                if not clock.depth:  # readings that others ask for are counted with those
                    clock.seconds += time.perf_counter() - started

        Reading.read_once = remember
        return self

    def __exit__(self, *error):
        Reading.read_once = self.remember


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model")
    parser.add_argument("--rounds", type=int, default=5, help="generated tokens; the median counts")
    args = parser.parse_args()
    mechanisms = {
        "hype": ha.HypeConfig(),
        "hsa": ha.HsaConfig(windows=(16, 64, 256)),
        "sparse": ha.SparseConfig(Pages(query="previous")),
    }
    sizes = dict(
        vocab_size=512, hidden_size=576, intermediate_size=1536, num_hidden_layers=args.layers
    )
    sizes |= dict(
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2 * args.length
    )
    ids, mask = (
        torch.randint(0, 512, (2, args.length)),
        torch.ones(2, args.length + 100, dtype=torch.long),
    )
    mask[1, :100] = 0
    print(f"{cpu()}, {torch.get_num_threads()} threads")
    for name, config in mechanisms.items():
        model = ha.patch_model(
            hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval(), config, mode="replace"
        )
        cache, shares = hf.DynamicCache(config=model.config), []
        for round_ in range(1 + args.rounds):
            given = ids if not round_ else ids[:, :1]
            stop = cache.get_seq_length() + given.shape[1]
            with torch.no_grad(), Clock() as clock:
                started = time.perf_counter()
                model(given, attention_mask=mask[:, :stop], past_key_values=cache, logits_to_keep=1)
                seconds = time.perf_counter() - started
            shares.append((clock.seconds / seconds, clock.places, seconds))
        (prompt, found, seconds), steps = shares[0], sorted(shares[1:])
        step, of_step, each = steps[len(steps) // 2]
        print(
            f"{name:8} prompt {100 * prompt:6.3f} % of {seconds:6.2f} s, {found} reading   "
            f"step {100 * step:6.3f} % of {1e3 * each:6.1f} ms, {of_step} reading",
            flush=True,
        )


if __name__ == "__main__":
    main()
