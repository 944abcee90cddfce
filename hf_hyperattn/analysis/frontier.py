"""Chooses how every head is tied: the least predicted loss at a given number of pairs, and the config that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import HyperAttnConfig
from ..mechanisms.hsa.config import HsaConfig
from ..mechanisms.hsa.layer import EVERYTHING
from .hsa_pairs import share
from .sensitivity import Sensitivity, Setting

#: Halvings of the interval that the price of a pair is looked for in.
HALVINGS = 60

#: What a head may be given: small windows at the bottom, so that refinement opens few tokens that do not matter, and
#: few at the top, so that little is looked at to find them.
WINDOWS = ((4, 16, 64), (4, 16), (16, 64, 256))
NEAR = (16, 48, 96, 192, 384, 768, 1536, 3072)
TOP_K = (0, 4, 8, 16, 32, 64, 96)
#: The mean logit understates what a block holds (exp of a mean is below the mean of exp), hence those above 0.
BIASES = (-math.inf, -1.0, 0.0, 0.5, 1.0, 2.0)
#: With refinement, no more pairs than this: nearness alone is the better use of more.
MOST = 0.42


def candidates(
    length: int, windows=WINDOWS, near=NEAR, top_k=TOP_K, biases: Sequence[float] = BIASES
) -> list[Setting]:
    """The settings that are measured for texts of a length, those that differ in their bias alone beside each other."""
    rules = [
        (sizes, close, top)
        for sizes in windows
        if sizes[-1] * 4 <= length
        for close in (n for n in near if n <= max(32, length // 2))
        for top in top_k
        if top * sizes[0] <= 512 and (top == 0 or top * sizes[0] >= 32)
    ]
    rules = [r for r in rules if not r[2] or r[1] < 2048 and share(length, *r[:2], 4, r[2]) <= MOST]
    return [Setting(sizes, close, 4, top, bias) for sizes, close, top in rules for bias in biases]


@dataclass(frozen=True)
class Selection:
    """How every head of every layer is tied.

    Args:
        heads: by layer, a setting for each query head, all of a layer over the same windows.
        length: tokens of the texts that pairs are counted for.
    """

    heads: Mapping[str, tuple[Setting, ...]]
    length: int

    @property
    def pairs(self) -> float:
        """Pairs looked at, in proportion to ordinary causal attention, over all heads."""
        shares = [s.share(self.length) for settings in self.heads.values() for s in settings]
        return sum(shares) / len(shares)

    def config(self) -> HyperAttnConfig | None:
        """What `patch_model` takes; None where every head is exact. Layers whose heads all are stay unpatched."""
        own = {
            name: (layer_config(s, self.length),)
            for name, s in self.heads.items()
            if not all(x.exact for x in s)
        }
        if not own:
            return None
        chosen = frozenset(own)
        layers = lambda host: host.name in chosen
        return HyperAttnConfig((HsaConfig(tying="key"),), layers=layers, mode="replace", overrides=own)


def layer_config(settings: Sequence[Setting], length: int | None = None) -> HsaConfig:
    """The config of a layer whose heads are tied so, chosen for texts of `length` tokens."""
    values = {
        name: tuple(getattr(s, name) for s in settings)
        for name in ("near", "sinks", "refine_top_k", "block_bias")
    }
    return HsaConfig(settings[0].windows, "key", **values, tuned_length=length)


def predicted(measured: Sequence[Sensitivity], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The loss a token that every setting of every head is expected to cost, [H, C] by layer.

    Args:
        measured: one for each text, of the same settings.
        weights: of the texts; None: the same for all.
    """
    weights = [1.0] * len(measured) if weights is None else weights
    total = sum(weights)
    return {
        name: sum(w / total * m.costs[name] for w, m in zip(weights, measured)) for name in measured[0].names
    }


def choose(
    settings: Mapping[str, Sequence[Setting]], losses: Mapping[str, Tensor], length: int, pairs: float
) -> Selection:
    """The selection of least loss among those that look at no more than the share `pairs` of all pairs.

    Loss plus λ times pairs is least where every layer takes the windows, and under them every head the setting, for
    which it is least; λ is found by halving.

    Args:
        settings: the candidates by layer. losses: what they cost, [H, C].
    """
    tables = [(name, by_windows(settings[name], losses[name], length)) for name in settings]
    low, high = 1e-12, 1e3
    best = select(tables, high, length)
    for _ in range(HALVINGS):
        price = (low * high) ** 0.5
        found = select(tables, price, length)
        if found.pairs > pairs:
            low = price
        else:
            high, best = price, found
    return best


def by_windows(
    settings: Sequence[Setting], losses: Tensor, length: int
) -> list[tuple[list[Setting], Tensor, Tensor]]:
    """Candidates, their losses [H, C] and pairs [C] for each kind of windows; exact attention is one of them."""
    found = []
    for windows in dict.fromkeys(s.windows for s in settings):
        index = [i for i, s in enumerate(settings) if s.windows == windows]
        candidates = [Setting(windows, EVERYTHING, 0), *(settings[i] for i in index)]
        loss = torch.cat([losses.new_zeros(len(losses), 1), losses[:, index]], 1)
        found.append((candidates, loss, torch.tensor([s.share(length) for s in candidates]).to(loss)))
    return found


def select(tables, price: float, length: int) -> Selection:
    """The best settings at a price of `price` for all pairs of a head."""
    heads = {}
    for name, kinds in tables:
        best = None
        for among, loss, pairs in kinds:
            cost, index = (loss + price * pairs).min(1)
            if best is None or cost.sum() < best[0]:
                best = (cost.sum(), tuple(among[i] for i in index.tolist()))
        heads[name] = best[1]
    return Selection(heads, length)
