"""Divide the joint loss of an allocation among its heads, and correct single-head losses by it.

`measure` finds the loss of a rule at one head while all others are exact. The joint loss is not
the sum: a head may find what another head no longer sees, and errors in the same direction add up.
So the allocation is applied to the model. Let o be the output of a head under its rule, o' the
output of ordinary attention for the same queries, keys and values, and G the gradient of
KL(original model ‖ model with the allocation) with respect to o. The part of this head is

    ½ Σ G·(o - o')

over all queries. For small changes, KL is nearly a quadratic form, and the parts of all heads then
add up to it. KL is used because, unlike the loss, it has no noise from the text's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..analysis.cost import patched_layers
from ..config.fields import refuse
from ..integration.patching.patch import base_model
from ..mechanisms.base import HostCall, Plan
from .allocate import Allocation
from .gradients import (
    Head,
    Spans,
    attention_gradients,
    compute_divergence,
    in_float32,
    predicted_of,
)
from .rules import CandidateRule

#: For each layer name, one number per head.
ByHead = dict[str, Tensor]
#: Largest factor of one correction, up or down. The parts come from a few texts only, so larger
#: factors would be noise.
MOST = 8.0


def loss_parts(
    model: nn.Module, ids: Tensor, teacher: Tensor, spans: Spans | None = None
) -> tuple[Tensor, ByHead]:
    """Compute the part of every head in the joint loss on one text.

    Args:
        model: A causal model that is patched with the allocation.
        ids: Token ids [N].
        teacher: Final hidden states [N, e] of the original model.
        spans: (start, stop) of the tokens whose prediction counts. None: all tokens.

    Returns:
        The final hidden states [N, e] of the patched model, and for each patched layer the parts
        of its heads [H], in nats per counted token.
    """
    parts: ByHead = {}
    students: list[Tensor] = []
    layers = dict(patched_layers(base_model(model)))
    counted = len(ids) if spans is None else len(predicted_of(spans, len(ids)))

    def on_gradient(name: str, call: HostCall, out: Tensor, gradient: Tensor) -> None:
        with torch.no_grad():
            if out.dtype != torch.float32:
                # The difference of two outputs that were rounded to 16 bits is mostly rounding.
                call = in_float32(call)
                out, _ = layers[name].forward(call)
            ordinary, _ = Plan.from_call(call).run()
            change = gradient.float() * (out.float() - ordinary.float())
            # Sum in float64: the terms have both signs and partly cancel.
            parts[name] = 0.5 / counted * change.sum((0, 2, 3), dtype=torch.float64).cpu()

    def teacher_loss(head: Head, hidden: Tensor) -> tuple[float, Tensor | None]:
        students.append(hidden.detach())
        return compute_divergence(head, hidden, teacher, spans=spans)

    attention_gradients(model, ids, on_gradient, teacher_loss)
    return students[0], parts


def corrected(
    losses: Mapping[str, Tensor],
    rules: Sequence[CandidateRule],
    allocation: Allocation,
    parts: ByHead,
    power: float,
) -> dict[str, Tensor]:
    """Rescale each head's losses by its part in the joint loss of an allocation.

    A head whose part is k times the expected one, relative to all heads, has its losses multiplied
    by k^`power`, by at most `MOST` and at least 1 / `MOST`.

    Args:
        losses: For each layer name, the loss of each rule at each head, [H, C].
        rules: The C candidate rules.
        allocation: The allocation that the parts were measured under.
        parts: For each patched layer, the parts of its heads [H], as `loss_parts` returns them.
        power: 1 applies the whole correction, 0 none. Use less than 1 if the parts come from few
            texts.

    Returns:
        For each layer name, the corrected losses [H, C]. Exact heads keep their losses. If all
        parts sum to 0 or less, nothing was lost jointly, and all losses are returned unchanged.

    Raises:
        ValueError: The allocation has rules that are not candidates; `parts` does not name exactly
            the patched layers, or is not finite; the power is not from 0 to 1.
    """
    check_correction(rules, allocation, parts, power)
    expected = expected_losses(losses, rules, allocation)
    joint_total = sum(parts[name].sum().item() for name in expected)
    expected_total = sum(values.sum().item() for values in expected.values())
    if joint_total <= 0 or expected_total <= 0:
        return dict(losses)
    # Only differences between heads count, so divide by the mean ratio over all heads.
    usual_ratio = joint_total / expected_total
    changed = dict(losses)
    for name, expected_here in expected.items():
        ratio = parts[name] / (usual_ratio * expected_here).clamp_min(1e-30)
        factor = ratio.clamp(1 / MOST, MOST) ** power
        # Exact heads have no expected loss and therefore no ratio.
        changed[name] = losses[name] * torch.where(expected_here > 0, factor, 1.0)[:, None]
    return changed


def check_correction(
    rules: Sequence[CandidateRule], allocation: Allocation, parts: ByHead, power: float
) -> None:
    """Raise ValueError if the arguments of `corrected` do not fit together."""
    if not 0 <= power <= 1:
        refuse("power", power, "numbers from 0 to 1")
    used = {rule for heads in allocation.sparse.values() for rule in heads if not rule.is_exact}
    if unknown_rules := used - set(rules):
        raise ValueError(
            f"corrected: {unknown_rules.pop()} is no candidate; allowed: the rules that have losses"
        )
    if missing := allocation.sparse.keys() - parts.keys():
        raise ValueError(
            f"corrected: no parts of {missing.pop()}; allowed: parts of all layers that are patched"
        )
    if unknown_layers := parts.keys() - allocation.sparse.keys():
        raise ValueError(
            f"corrected: parts of {min(unknown_layers)}; allowed: parts of patched layers only"
        )
    for name, part in parts.items():
        if not part.isfinite().all():
            raise ValueError(
                f"corrected: the parts of {name} are not all finite; allowed: finite numbers"
            )


def expected_losses(
    losses: Mapping[str, Tensor], rules: Sequence[CandidateRule], allocation: Allocation
) -> ByHead:
    """Return the loss that each head of the patched layers was expected to have, [H] per layer."""
    column = {rule: i for i, rule in enumerate(rules)}
    expected: ByHead = {}
    for name, chosen in allocation.sparse.items():
        values = [
            0.0 if rule.is_exact else losses[name][head, column[rule]].item()
            for head, rule in enumerate(chosen)
        ]
        expected[name] = torch.tensor(values, dtype=torch.float64)
    return expected
