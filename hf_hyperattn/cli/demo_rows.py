"""What `hyperattn demo` measures: one row a kind of attention, on one model and one text."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path

import torch

import hf_hyperattn

from ..analysis import PeakMemory, max_logit_difference, measure_generation, next_token_logits, perplexity
from . import smollm2
from .demo_setting import Setting

STOCK, PATCHED, REPLACED = "stock (sdpa)", "cone, patched in", "cone, replaced"
INJECTED, TIED = "hsa, injected", "hsa, defaults"
COMPARED = 128  # tokens over which logits are compared with the stock model's
GENERATED_STEP = 16  # progress-bar steps of a generated token; a token read is one


@dataclass
class Row:
    """What was measured of one kind of attention."""

    label: str
    perplexity: float
    prefill: float
    generate: float
    memory: int
    difference: float | None
    text: str

    def cells(self) -> tuple[str, ...]:
        """The row as it is shown."""
        value = f"{self.perplexity:,.2f}" if self.perplexity < 1e6 else f"{self.perplexity:.1e}"
        difference = "" if self.difference is None else f"{self.difference:.1e}"
        memory = f"{self.memory / 2**20:,.0f} MiB"
        return self.label, value, f"{self.prefill:,.0f}", f"{self.generate:,.1f}", memory, difference


def steps(setting: Setting) -> int:
    """Steps of the progress bar for all rows."""
    return 4 * (len(setting.ids) + GENERATED_STEP * setting.new_tokens)


def measure(setting: Setting, bar) -> list[Row]:
    """All rows. The stock model is measured, then patched in place in two ways and measured again, then let go."""
    bar.describe("loading")
    model = setting.load("sdpa")
    bar.describe(STOCK)
    reference = _logits(setting, model)
    rows = [_row(setting, STOCK, model, bar)]
    label, config = tying(setting, model)
    bar.describe(label)
    hf_hyperattn.patch_model(model, config, **({} if label == INJECTED else {"mode": "replace"}))
    hsa = _row(setting, label, model, bar, reference)
    hf_hyperattn.unpatch_model(model)
    bar.describe(PATCHED)
    hf_hyperattn.patch_model(model, hf_hyperattn.ConeConfig())
    rows.append(_row(setting, PATCHED, model, bar, reference))
    del model
    gc.collect()
    bar.describe("loading")
    model = setting.load("cone")
    bar.describe(REPLACED)
    rows += [_row(setting, REPLACED, model, bar, reference), hsa]
    return rows


def tying(setting: Setting, model: torch.nn.Module) -> tuple[str, object]:
    """What the hsa row is called, and its config: what was found for SmolLM2 at this length, else the defaults.

    At 2,048 tokens `hyperattn inject` found it; at 8,192 it is the point "chosen 0.2" of benchmarks/hsa_frontier.py.
    """
    length = 2048 if setting.window <= 4096 else 8192
    text = (Path(__file__).parent / f"smollm2_hsa_{length}.json").read_text(encoding="utf-8")
    found = hf_hyperattn.HyperAttnConfig.from_dict(json.loads(text))
    if setting.name == smollm2.NAME and set(found.hosts) <= {name for name, _ in model.named_modules()}:
        return INJECTED, found
    return TIED, hf_hyperattn.HsaConfig()


def _row(setting: Setting, label: str, model: torch.nn.Module, bar, reference=None) -> Row:
    measure_generation(model, setting.prompt, 2)  # what is set up on first use is no part of the speed
    with PeakMemory(setting.device) as memory:
        quality = perplexity(model, setting.ids, setting.window, prefix=setting.prefix, on_window=bar.advance)
        generation = measure_generation(
            model, setting.prompt, setting.new_tokens, on_token=lambda: bar.advance(GENERATED_STEP)
        )
    apart = None if reference is None else max_logit_difference(_logits(setting, model), reference)
    text = setting.tokenizer.decode(list(generation.ids), skip_special_tokens=True)
    return Row(
        label,
        quality.value,
        quality.tokens_per_second,
        generation.tokens_per_second,
        memory.peak,
        apart,
        text,
    )


def _logits(setting: Setting, model: torch.nn.Module) -> torch.Tensor:
    return next_token_logits(model, setting.prefix + setting.ids[: min(COMPARED, setting.window)])
