"""What tying the attention of single heads costs a causal model, setting by setting, measured before any is chosen.

With o the output of a head, o_c its output under the setting c, and G the gradient of the loss with respect to o, both
at one query, the change that c makes to the loss of a text is about

    Σ G·(o_c - o) + ½ Σ (G·(o_c - o))²

The first term is noise of the text where the model is as it was (its expectation under the model is 0), and says where
to go where the loss is the divergence from the untied model and the model is tied already. The second is the Fisher
information along the change. The certificate of a setting, KL(tied ‖ own attention), comes with it: since tied logits
are the means of those they stand for, it is the difference of the log-sum-exps (math in docs/hsa.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..integration import patch_model, unpatch_model
from ..integration.patching import base_model
from ..mechanisms.base import HostCall
from ..mechanisms.hsa import operator
from ..mechanisms.hsa.config import HsaConfig
from ..mechanisms.hsa.layer import EVERYTHING
from ..mechanisms.hsa.levels import pool
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
        slopes: by layer [R, H, C]: G·(o_c - o) at R sampled queries. kl: by layer [H, C]: the certificate, in nats.
        loss: of the text, a token.
    """

    names: list[str]
    settings: dict[str, list[Setting]]
    slopes: dict[str, Tensor]
    kl: dict[str, Tensor]
    loss: float


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
    teacher: Tensor | None = None,
    last: int | None = None,
    on_layer: Callable[[str], None] | None = None,
) -> Sensitivity:
    """Measure settings of every head of a causal model on one text.

    Args:
        model: not patched, for its own attention as the starting point; or patched with hsa, for the setting it has.
        ids: token ids [N].
        settings: the candidates of a layer, by its name.
        rows: how many queries are sampled.
        teacher, last: see `listen_to_gradients`. With `last`, queries are sampled among that many at the end.
    """
    found = Sensitivity([], {}, {}, {}, 0.0)
    read = max(0, len(ids) - (last or len(ids)))
    starts = sampled(len(ids) - read, rows, seed)

    def listener(name: str, call: HostCall, out: Tensor, gradient: Tensor) -> None:
        if tieable(call, len(ids), read):
            candidates = list(settings(name))
            slopes, kl = compare(call, out, gradient, candidates, starts)
            found.settings[name], found.slopes[name], found.kl[name] = candidates, slopes, kl
            found.names.insert(0, name)
        if on_layer:
            on_layer(name)

    patched = any(True for m in base_model(model).modules() if type(m).__name__ == "Hyper")
    if not patched:
        patch_model(model, HsaConfig(), mode="blend")  # gates at 0: the attention is the model's own
    try:
        found.loss = listen_to_gradients(model, ids, listener, teacher, last)
    finally:
        if not patched:
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
    """`slopes` [R, H, C] and `kl` [H, C] of one layer."""
    query, heads = call.query.detach().float(), call.query.shape[1]
    at = torch.cat([torch.arange(s, s + CHUNK) for s in starts])
    own, G = (t[0].float()[:, at] for t in (out, gradient))
    pooled, slopes, sums = {}, [], []
    exact = Setting(settings[0].windows, EVERYTHING)
    for setting in (exact, *settings):
        if setting.windows not in pooled:
            pooled[setting.windows] = pool(call.key.detach(), call.value.detach(), setting.windows)
        found = [tied(query, pooled[setting.windows], setting, call, s) for s in starts]
        slopes.append((G * (torch.cat([o for o, _ in found], 2)[0] - own)).sum(-1))
        sums.append(torch.cat([s for _, s in found], 2)[0])
    kl = torch.stack([(sums[0] - s).mean(1) for s in sums[1:]], -1)
    assert kl.shape == (heads, len(settings))
    return torch.stack(slopes[1:], -1).transpose(0, 1).contiguous(), kl


def tied(query: Tensor, levels, setting: Setting, call: HostCall, start: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a chunk of queries, which are those of the last tokens."""
    heads = query.shape[1]
    offset = levels.keys[0].shape[2] - query.shape[2]
    bias = query.new_full((heads,), setting.block_bias)
    tensors = [query[:, :, start : start + CHUNK], *levels.keys, *levels.values, bias]
    extras = "block_bias"
    if call.options.sinks is not None:
        tensors, extras = [*tensors, call.options.sinks.float()], "block_bias sink_logit"
    rule = [[x] * heads for x in (setting.near, setting.sinks, setting.refine_top_k)]
    return operator.forward(tensors, extras, None, None, list(setting.windows), *rule, True, start + offset,
                            float(call.scale), "auto")  # fmt: skip
