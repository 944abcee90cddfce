"""What tying the attention of single heads costs a causal model, setting by setting, measured before any is chosen.

With o the output of a head, o_c its output under the setting c, and G the gradient of the loss with respect to o, both
at one query, the change that c makes to the loss of a text is about

    Σ G·(o_c - o) + ½ Σ (G·(o_c - o))²

The first term is noise of the text, its expectation under the model being 0, and is left out. The second is the Fisher
information along the change. The certificate of a setting, KL(tied ‖ own attention), comes with it: since tied logits
are the means of those they stand for, plus the block bias, it is the difference of the log-sum-exps plus the bias times
the weight of closed blocks (math in docs/hsa.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..integration import patch_model, unpatch_model
from ..mechanisms.base import HostCall
from ..mechanisms.hsa.config import HsaConfig
from ..mechanisms.hsa.layer import EVERYTHING
from ..mechanisms.hsa.windowed.key import attend_levels, pool
from .attention_gradients import listen_to_gradients
from .hsa_pairs import share

#: Queries that stand side by side: a bottom window of them shares its keys in the cache of the processor.
CHUNK = 16


@dataclass(frozen=True)
class Setting:
    """How one head is tied. `near` of `EVERYTHING` is exact attention; a `block_bias` of -inf drops closed blocks."""

    windows: tuple[int, ...]
    near: int
    sinks: int = 4
    refine_top_k: int = 0
    block_bias: float = 0.0

    def share(self, length: int) -> float:
        """Pairs looked at, in proportion to ordinary causal attention over a text of `length` tokens."""
        rule = (self.near, self.sinks, self.refine_top_k, self.block_bias == -math.inf)
        return share(length, self.windows, *rule)

    @property
    def exact(self) -> bool:
        """Whether every key is looked at by itself."""
        return self.near >= EVERYTHING


@dataclass
class Sensitivity:
    """What was measured on the sampled queries of one text.

    Args:
        names: of the layers. settings: by layer, its candidates.
        costs: by layer [H, C]: what a setting is expected to cost, in nats a token: half the mean square of the slopes.
        kl: by layer [H, C]: the certificate, in nats.
        loss: of the text, a token.
        slopes: by layer [R, H, C]: G·(o_c - o) at R sampled queries; kept where asked for.
    """

    names: list[str]
    settings: dict[str, list[Setting]]
    costs: dict[str, Tensor]
    kl: dict[str, Tensor]
    loss: float
    slopes: dict[str, Tensor] = field(default_factory=dict)


def sampled(length: int, rows: int, seed: int) -> list[int]:
    """Starts of chunks of queries, spread evenly over a text with a random shift of each."""
    count = max(1, min(rows, length) // CHUNK)
    shift = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    places = ((torch.arange(count) + shift) * (length / CHUNK / count)).long() * CHUNK
    return sorted({min(int(p), length - CHUNK) for p in places})


def measure(
    model: nn.Module,
    ids: Tensor,
    settings: Callable[[str], Sequence[Setting]],
    *,
    rows: int = 384,
    seed: int = 0,
    last: int | None = None,
    on_layer: Callable[[str], None] | None = None,
    keep: bool = False,
) -> Sensitivity:
    """Measure settings of every head of a causal model on one text.

    Args:
        model: not patched; it is, while it is measured.
        ids: token ids [N].
        settings: the candidates of a layer, by its name. Those that differ in their block bias alone are best beside
            each other: they are computed together.
        rows: how many queries are sampled.
        last: only so many tokens at the end are predicted, and queries are sampled among them; None: all (see
            `listen_to_gradients`).
        on_layer: called with the name of every layer that is done.
        keep: the slopes too, which may be many.
    """
    found = Sensitivity([], {}, {}, {}, 0.0)
    read = max(0, len(ids) - (last or len(ids)))
    starts = sampled(len(ids) - read, rows, seed)

    def listener(name: str, call: HostCall, out: Tensor, gradient: Tensor) -> None:
        if tieable(call, len(ids), read):
            candidates = list(settings(name))
            slopes, kl = compare(call, out, gradient, candidates, starts)
            found.settings[name], found.kl[name] = candidates, kl
            found.costs[name] = 0.5 * slopes.double().square().mean(0)
            if keep:
                found.slopes[name] = slopes
            found.names.insert(0, name)
        if on_layer:
            on_layer(name)

    patch_model(model, HsaConfig(), mode="blend")  # gates at 0: the attention is the model's own
    try:
        found.loss = listen_to_gradients(model, ids, listener, last)
    finally:
        unpatch_model(model)
    return found


def tieable(call: HostCall, length: int, read: int = 0) -> bool:
    """Whether the attention is causal over the whole text, with nothing that tied attention does not have."""
    options = call.options
    windowed = options.window is not None and options.window < length
    masked = options.mask is not None and not read  # after what a cache has read, a mask says what is causal
    plain = not masked and options.bias is None and options.softcap is None and not windowed
    return plain and call.is_causal and call.query.shape[2] + read == call.key.shape[2] == length


def compare(
    call: HostCall, out: Tensor, gradient: Tensor, settings: Sequence[Setting], starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`slopes` [R, H, C] and `kl` [H, C] of one layer.

    Attention is computed with closed blocks kept and with them dropped. Every other bias weighs the one against the
    other: with P the weight that closed blocks have at bias 0, e^b P / (1 - P + e^b P) of them is left.
    """
    query, heads = call.query.detach().float(), call.query.shape[1]
    at = torch.cat([torch.arange(s, s + CHUNK) for s in starts])
    own, G = (t[0].float()[:, at] for t in (out, gradient))
    pooled, ends = {}, {}

    def run(setting: Setting) -> tuple[Tensor, Tensor]:
        """Slopes [H, R] and log-sum-exps [H, R]."""
        if setting.windows not in pooled:
            pooled.clear()
            pooled[setting.windows] = pool(call.key.detach(), call.value.detach(), setting.windows)
        found = [tied(query, pooled[setting.windows], setting, call, s) for s in starts]
        outputs, sums = (torch.cat(parts, 2)[0] for parts in zip(*found, strict=True))
        return (G * (outputs - own)).sum(-1), sums

    slopes, kl, (_, whole) = [], [], run(Setting(settings[0].windows, EVERYTHING))
    for setting in settings:
        rule = replace(setting, block_bias=0.0)
        if rule not in ends:
            ends = {rule: (run(rule), run(replace(rule, block_bias=-math.inf)))}
        slope, divergence = between(*ends[rule], setting.block_bias, whole)
        slopes.append(slope.T)
        kl.append(divergence.mean(1))
    assert kl[0].shape == (heads,)
    return torch.stack(slopes, -1), torch.stack(kl, -1)


def between(kept, dropped, bias: float, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and KL(tied ‖ own attention) for a block bias, from those (slope, log-sum-exp) of 0 and -inf."""
    if bias == 0:
        return kept[0], whole - kept[1]
    if bias == -math.inf:
        return dropped[0], whole - dropped[1]
    closed = -torch.expm1((dropped[1] - kept[1]).clamp_max(0))  # weight of closed blocks at bias 0
    total = 1 + math.expm1(bias) * closed  # of all, in units of the sum at bias 0
    slope = dropped[0] + math.exp(bias) / total * (kept[0] - dropped[0])
    return slope, whole - kept[1] - total.log() + bias * math.exp(bias) * closed / total


def tied(query: Tensor, levels, setting: Setting, call: HostCall, start: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a chunk of queries, which are those of the last tokens."""
    heads = query.shape[1]
    offset = levels.keys[0].shape[2] - query.shape[2]
    bias = query.new_full((heads,), setting.block_bias)
    rule = [[x] * heads for x in (setting.near, setting.sinks, setting.refine_top_k)]
    sinks = None if call.options.sinks is None else call.options.sinks.float()
    part = query[:, :, start : start + CHUNK]
    return attend_levels(part, levels, *rule, bias, sinks, True, start + offset, float(call.scale))
