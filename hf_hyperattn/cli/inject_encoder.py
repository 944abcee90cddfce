"""Injection into an encoder of text: the loss is 1 - cosine of mean-pooled embeddings, and layers are chosen whole.

What a layer loses is measured by tying it alone. What several lose together is more than the sum, so that the choice is
tried on further text, with fewer layers until the budget holds.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_hyperattn

from ..analysis.attention_time import attention_times
from ..analysis.cost import PeakMemory
from ..config import HyperAttnConfig
from ..integration.hosts import find_hosts
from ..mechanisms.hsa.config import HsaConfig
from ..mechanisms.hsa.windowed.pairs import attended
from .console import progress, table
from .inject_output import write
from .inject_setting import PASSAGES
from .inject_setting import Setting as Task

WINDOWS = ((4,), (8,), (16,), (8, 64))
NEAR = (8, 32, 64)
MARGIN = 0.8


def candidates(length: int) -> list[HsaConfig]:
    """Settings of a layer for passages of `length` tokens."""
    found = []
    for windows in (w for w in WINDOWS if 2 * w[-1] <= length):
        found.append(HsaConfig(windows, "both", tuned_length=length))
        for near in (n for n in NEAR if 2 * n <= length):
            found += [
                HsaConfig(windows, "key", near=near, sinks=1, refine_top_k=k, tuned_length=length)
                for k in (0, 4)
            ]
    return found


def share(config: HsaConfig, length: int) -> float:
    """Pairs looked at, of all length²: with tying="both" pairs of siblings, each once for a whole family."""
    sizes = (1, *config.windows, length)
    if config.tying == "both":
        whole = sum(length / low * min(high / low, length / low) for low, high in zip(sizes, sizes[1:]))
        return min(1.0, whole / length**2)
    return min(
        1.0,
        attended(length, config.windows, config.near, config.sinks, config.refine_top_k, False) / length**2,
    )


def embeddings(model: nn.Module, passages: Tensor) -> Tensor:
    """Mean-pooled last hidden states, [B, e]."""
    with torch.no_grad():
        return model(passages).last_hidden_state.float().mean(1)


def passages_of(task: Task, part: int) -> dict[str, Tensor]:
    """The passages of one part of every text, [PASSAGES, N], between the tokenizer's first and last special token."""
    first, last = (task.tokenizer.cls_token_id, task.tokenizer.sep_token_id)
    ends = [[x] if x is not None else [] for x in (first, last)]
    inner = task.length - sum(map(len, ends))
    rows = {}
    for name, pieces in task.texts.items():
        cut = pieces[part].tolist()
        rows[name] = torch.tensor(
            [ends[0] + cut[i * task.length : i * task.length + inner] + ends[1] for i in range(PASSAGES)]
        )
    return rows


def lost(
    model: nn.Module, own: dict[str, Tensor], passages: dict[str, Tensor], chosen: dict
) -> dict[str, float]:
    """1 - cosine by text of a model that is tied so, and left as it was."""
    if not chosen:
        return dict.fromkeys(passages, 0.0)
    hf_hyperattn.patch_model(model, config_of(chosen))
    try:
        return {
            name: 1 - F.cosine_similarity(embeddings(model, rows), own[name]).mean().item()
            for name, rows in passages.items()
        }
    finally:
        hf_hyperattn.unpatch_model(model)


def config_of(chosen: dict[str, HsaConfig]) -> HyperAttnConfig:
    """What `patch_model` takes for these layers."""
    names = frozenset(chosen)
    own = {name: (config,) for name, config in chosen.items()}
    layers = lambda host: host.name in names
    return HyperAttnConfig((HsaConfig(),), layers=layers, mode="replace", overrides=own)


def inject(task: Task) -> int:
    """The whole of it; 0, or 1 where the held-out texts exceed the budget and nothing is written."""
    model = task.load()
    names, settings = [name for name, _ in find_hosts(model)], candidates(task.length)
    first, second, third = (passages_of(task, part) for part in range(3))
    with progress(len(names) * len(settings)) as bar:
        own = {name: embeddings(model, rows) for name, rows in first.items()}
        costs = {}
        for name in names:
            bar.describe(f"measuring {name}")
            for setting in settings:
                found = lost(model, own, first, {name: setting})
                costs[name, setting] = max(found.values())
                bar.advance(1)
        own = {name: embeddings(model, rows) for name, rows in second.items()}
        bar.describe("choosing")
        chosen, tried = settle(task, model, names, settings, costs, own, second)
    if not chosen:
        raise ValueError(
            f"no layer can be tied within --budget {task.args.budget:g} on these texts; allowed: a larger budget"
        )
    return verify(task, model, names, settings, costs, chosen, tried, third)


def settle(task: Task, model, names, settings, costs, own, passages) -> tuple[dict, list]:
    """The cheapest layers and settings that keep the budget on the second parts, and all that was tried."""
    goal, tried = MARGIN * task.args.budget, []
    for _ in range(6):
        chosen = cheapest(names, settings, costs, goal, task.length)
        found = lost(model, own, passages, chosen)
        tried.append((len(chosen), pairs_of(chosen, names, task.length), found))
        if max(found.values()) <= MARGIN * task.args.budget:
            return chosen, tried
        goal /= 2
    return {}, tried


def cheapest(names, settings, costs, goal: float, length: int) -> dict[str, HsaConfig]:
    """By layer the setting, of the fewest pairs whose losses sum to at most `goal`; layers without one stay exact."""
    low, high, best = 1e-12, 1e6, {}
    for _ in range(60):
        price, chosen, total = math.sqrt(low * high), {}, 0.0
        for name in names:
            setting = min(settings, key=lambda s: costs[name, s] + price * share(s, length))
            if costs[name, setting] + price * share(setting, length) < price:
                chosen[name], total = setting, total + costs[name, setting]
        if total <= goal:
            low, best = price, chosen
        else:
            high = price
    return best


def pairs_of(chosen: dict[str, HsaConfig], names, length: int) -> float:
    """The share of pairs over all layers."""
    return sum(share(chosen[n], length) if n in chosen else 1.0 for n in names) / len(names)


def verify(task: Task, model, names, settings, costs, chosen, tried, passages) -> int:
    """Patch, measure on the third parts, print, write."""
    stock, tied, seconds, memory = {}, {}, [0.0, 0.0], []
    for i, found in enumerate((stock, tied)):
        if i:
            hf_hyperattn.patch_model(model, config_of(chosen))
        embeddings(model, next(iter(passages.values())))  # what is set up on first use is no part of the time
        with PeakMemory() as peak:
            for name, rows in passages.items():
                start = time.perf_counter()
                found[name] = embeddings(model, rows)
                seconds[i] += time.perf_counter() - start
        memory.append(peak.peak)
    cosines = {n: F.cosine_similarity(tied[n], stock[n]).mean().item() for n in stock}
    times = attention_times(model, next(iter(passages.values())))
    print("\nLoss of each layer tied alone (1 - cosine, worst text), the least and by its chosen setting:")
    rows = [
        [n, f"{min(costs[n, s] for s in settings):.5f}", f"{costs[n, chosen[n]]:.5f}" if n in chosen else "exact",
         brief(chosen.get(n))]
        for n in names
    ]  # fmt: skip
    table(("layer", "least", "chosen", "setting"), rows)
    print("\nTried, on the second part of each text:")
    table(
        ("layers", "pairs", *stock),
        [[str(n), f"{p:.1%}", *(f"{x:.4f}" for x in f.values())] for n, p, f in tried],
    )
    report = {
        "metric": "cosine",
        "pairs": pairs_of(chosen, names, task.length),
        "texts": {n: {"before": 1.0, "after": c, "loss": 1 - c} for n, c in cosines.items()},
        "seconds": {"before": seconds[0], "after": seconds[1]},
        "attention_seconds": {"before": times[0], "after": times[1]},
        "memory": {"before": memory[0], "after": memory[1]},
        "length": task.length,
    }
    from .inject_causal import show_verified

    show_verified(task, report)
    worst = min(cosines, key=cosines.get)
    if 1 - cosines[worst] > task.args.budget:
        print(f"\nheld-out text {worst} loses {1 - cosines[worst]:.4f}, more than the budget of "
              f"{task.args.budget:g}: nothing is written; use longer texts, or a larger --budget")  # fmt: skip
        return 1
    write(task, model, None, report)
    return 0


def brief(config: HsaConfig | None) -> str:
    """A setting in a few words."""
    if config is None:
        return ""
    if config.tying == "both":
        return f"both {config.windows}"
    return f"key {config.windows} near {config.near} top {config.refine_top_k}"
