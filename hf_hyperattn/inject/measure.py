"""What sparse rules at single heads cost a causal model, measured before any is chosen.

With o the output of a head, o_c its output under the rule c, and G the gradient of the loss with respect to o, both at
one query, the change that c makes to the loss of a text is about

    Σ G·(o_c - o) + ½ Σ (G·(o_c - o))²

The first term is noise of the text, its expectation under the model being 0, and is left out. The second is the Fisher
information along the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from ..integration import patch_model, unpatch_model
from ..mechanisms.base import HostCall
from .gradients import attention_gradients
from .rules import CHUNK, SparseRule


@dataclass
class Sensitivity:
    """What was measured on the sampled queries of one text; tensors by layer, the layers in the model's order.

    Args:
        rules: the C candidates.
        costs: [H, C]: what a rule is expected to cost, in nats a token: half the mean square of the slopes.
        kl: [H, C]: KL(under the rule ‖ ordinary attention), in nats.
        loss: of the text, a token.
        slopes: [R, H, C]: G·(o_c - o) at R sampled queries; only where they are to be kept.
    """

    rules: list[SparseRule]
    costs: dict[str, Tensor] = field(default_factory=dict)
    kl: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
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
    rules: Sequence[SparseRule],
    *,
    rows: int = 384,
    seed: int = 0,
    on_layer: Callable[[str], None] | None = None,
    keep_slopes: bool = False,
) -> Sensitivity:
    """Measure rules at every head of a causal model on one text.

    Args:
        model: not patched; it is, while it is measured.
        ids: token ids [N].
        rules: the candidates, those of one class beside each other.
        rows: how many queries are sampled.
        on_layer: called with the name of every layer that is done.
        keep_slopes: of which there may be many.
    """
    result, starts = Sensitivity(list(rules)), sampled(len(ids), rows, seed)

    def on_gradient(name: str, call: HostCall, out: Tensor, gradient: Tensor) -> None:
        if is_plain(call, len(ids)):
            slopes, kl = compare(call, out, gradient, result.rules, starts)
            result.kl[name], slopes = kl.cpu(), slopes.cpu()  # layers may be on different devices
            result.costs[name] = 0.5 * slopes.double().square().mean(0)
            if keep_slopes:
                result.slopes[name] = slopes
        if on_layer:
            on_layer(name)

    patch_model(model, rules[0].base_config(), mode="blend")  # gates at 0: the attention is the model's own
    try:
        result.loss = attention_gradients(model, ids, on_gradient)
    finally:
        unpatch_model(model)
    for tensors in (result.costs, result.kl, result.slopes):  # the last layer came first
        for name in reversed(list(tensors)):
            tensors[name] = tensors.pop(name)
    return result


def is_plain(call: HostCall, length: int) -> bool:
    """Whether the attention is causal over the whole text, with nothing that rules do not have."""
    options = call.options
    windowed = options.window is not None and options.window < length
    plain = options.mask is None and options.bias is None and options.softcap is None and not windowed
    return plain and call.is_causal and call.query.shape[2] == call.key.shape[2] == length


def compare(
    call: HostCall, out: Tensor, gradient: Tensor, rules: Sequence[SparseRule], starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Slopes [R, H, C] and KL divergences [H, C] of one layer."""
    at = torch.cat([torch.arange(s, s + CHUNK) for s in starts])
    plain, G = (t[0].float()[:, at] for t in (out, gradient))
    project = lambda outputs: (G * (outputs - plain)).sum(-1)
    slopes, kl = [], []
    for _, group in groupby(rules, type):
        alike = list(group)
        for slope, divergence in alike[0].compare(call, alike, starts, project):
            slopes.append(slope.T)
            kl.append(divergence.mean(1))
    return torch.stack(slopes, -1), torch.stack(kl, -1)
