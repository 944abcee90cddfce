"""What heads lose together: the loss of a whole allocation, shared out among the heads that make it.

`measure` finds what a rule loses at one head while all others are exact. What several lose is not the sum: one head may
find what another one no longer sees, and errors of the same direction add up. So the allocation is put into the model,
and with o the output of a head under its rule, o' that of ordinary attention for the same queries, keys and values, and
G the gradient by o of KL(model as it was ‖ model as allocated), the head's part is

    ½ Σ G·(o - o')

over all queries. Where KL is a quadratic form of the changes, as it nearly is where they are small, the parts of all
heads add up to it. KL has no noise of the text's own tokens in it, as the loss has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..fields import refuse
from ..mechanisms.base import HostCall, Plan
from .allocate import Allocation
from .gradients import Head, Spans, attention_gradients, divergence, predicted_of
from .rules import CandidateRule

#: By layer, a number for each head.
ByHead = dict[str, Tensor]
#: The largest correction at once, up or down: parts are of a few texts.
MOST = 8.0


def loss_parts(
    model: nn.Module, ids: Tensor, teacher: Tensor, spans: Spans | None = None
) -> tuple[Tensor, ByHead]:
    """What every head of an allocation has to do with what is lost on one text.

    Args:
        model: causal, patched with the allocation.
        ids: token ids [N].
        teacher: final hidden states [N, e] of the model as it was.
        spans: (start, stop) of the tokens whose prediction counts; None: all.

    Returns:
        The final hidden states [N, e], and by patched layer [H] nats a token that counts.
    """
    parts: ByHead = {}
    seen: list[Tensor] = []
    counted = len(ids) if spans is None else len(predicted_of(spans, len(ids)))

    def on_gradient(name: str, call: HostCall, out: Tensor, gradient: Tensor) -> None:
        with torch.no_grad():
            ordinary, _ = Plan.from_call(call).run()
            change = gradient.float() * (out.float() - ordinary.float())
            parts[name] = 0.5 / counted * change.sum((0, 2, 3), dtype=torch.float64).cpu()

    def loss(head: Head, hidden: Tensor) -> tuple[float, Tensor | None]:
        seen.append(hidden.detach())
        return divergence(head, hidden, teacher, spans=spans)

    attention_gradients(model, ids, on_gradient, loss)
    return seen[0], parts


def corrected(
    losses: Mapping[str, Tensor],
    rules: Sequence[CandidateRule],
    allocation: Allocation,
    parts: ByHead,
    power: float,
) -> dict[str, Tensor]:
    """What rules lose, with every head's in proportion to what it was found to lose together with the others.

    Args:
        losses: by layer [H, C]. rules: the C candidates. allocation: which of them every head had.
        parts: by patched layer [H], as `loss_parts` finds them.
        power: of how much more or less a head loses than it was thought to, over what all heads do: 1 for the whole of
            it, 0 for none, less than 1 where parts are of few texts.

    Returns:
        By layer [H, C]. A head that was exact keeps what it had; others lose up to `MOST` times as much, or as little.
        Where all parts sum to 0 or less, nothing was lost together, and the losses are as they were.

    Raises:
        ValueError: the allocation has rules that are no candidates, or patched layers of which there are no parts;
            parts of other layers, or that are not finite; a power that is not from 0 to 1.
    """
    if not 0 <= power <= 1:
        refuse("power", power, "numbers from 0 to 1")
    column = {rule: i for i, rule in enumerate(rules)}
    used = {rule for heads in allocation.sparse.values() for rule in heads if not rule.is_exact}
    if strange := used - column.keys():
        raise ValueError(
            f"corrected: {strange.pop()} is no candidate; allowed: the rules that losses are of"
        )
    if missing := allocation.sparse.keys() - parts.keys():
        raise ValueError(
            f"corrected: no parts of {missing.pop()}; allowed: those of all layers that are patched"
        )
    if strange_layers := parts.keys() - allocation.sparse.keys():
        raise ValueError(
            f"corrected: parts of {min(strange_layers)}; allowed: those of layers that are patched alone"
        )
    for name, part in parts.items():
        if not part.isfinite().all():
            raise ValueError(
                f"corrected: the parts of {name} are not all finite; allowed: finite numbers"
            )
    thought: ByHead = {}
    for name, chosen in allocation.sparse.items():
        lost = [
            0.0 if rule.is_exact else losses[name][h, column[rule]].item()
            for h, rule in enumerate(chosen)
        ]
        thought[name] = torch.tensor(lost, dtype=torch.float64)
    found = {name: parts[name] for name in thought}
    whole, expected = (
        sum(x.sum().item() for x in by_head.values()) for by_head in (found, thought)
    )
    if whole <= 0 or expected <= 0:
        return dict(losses)
    usual = whole / expected
    changed = dict(losses)
    for name, at in thought.items():
        more = (found[name] / (usual * at).clamp_min(1e-30)).clamp(1 / MOST, MOST) ** power
        changed[name] = losses[name] * torch.where(at > 0, more, 1.0)[:, None]
    return changed
