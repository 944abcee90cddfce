"""Run a model on fixed inputs and compare what comes out."""

import copy

import torch
from transformers import PreTrainedModel

TOLERANCE = 1e-5  # the identity contract, float32


def tensors(out, path=""):
    """All floating-point tensors of an output, by path; caches are left out."""
    if isinstance(out, torch.Tensor):
        return {path: out} if out.is_floating_point() or out.is_complex() else {}
    if isinstance(out, dict):
        items = out.items()
    elif isinstance(out, (list, tuple)):
        items = enumerate(out)
    else:
        return {}
    found = {}
    for key, value in items:
        found |= tensors(value, f"{path}.{key}")
    return found


def run(model, inputs, grad=False):
    """The output tensors of one forward, seeded: some models draw noise."""
    forget(model)
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad):
        return tensors(model(**copy.deepcopy(inputs)))


def forget(model):
    """Empty the memory of text features that one family keeps from call to call."""
    for module in model.modules():
        for value in vars(module).values():
            if type(value).__name__.endswith("LRUCache"):
                value.cache.clear()
                value.current_load = 0


def gap(one, other):
    """Largest difference between two outputs, over max(1, largest magnitude); 0.0 only where they are bitwise equal.

    Infinities at the same places are equal.
    """
    if one.keys() != other.keys():
        return float("inf")
    worst = 0.0
    for name, a in one.items():
        b = other[name]
        if a.shape != b.shape:
            return float("inf")
        if torch.equal(a, b) or a.numel() == 0:
            continue
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            return float("inf")
        a, b = a.detach()[finite], b.detach()[finite]
        if a.numel():
            worst = max(worst, float((a - b).abs().max() / max(1.0, float(a.abs().max()))))
    return worst


def finite(out):
    """Whether no output is NaN; masks of logits may be infinite."""
    return bool(out) and not any(bool(v.isnan().any()) for v in out.values())


def snapshot(model):
    """What unpatching must give back: class, keys and values, implementations, hooks, config."""
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    return {
        "class": [type(m) for m in model.modules()],
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "implementation": [m.config._attn_implementation for m in parts],
        "config": [repr(sorted(m.config.to_dict().items(), key=str)) for m in parts],
        "hooks": sum(
            len(getattr(m, n))
            for m in model.modules()
            for n in (
                "_forward_hooks",
                "_forward_pre_hooks",
                "_backward_hooks",
                "_backward_pre_hooks",
            )
        ),
        "attributes": [
            sorted(k for k in vars(m) if not k.startswith("_")) for m in model.modules()
        ],
    }


def changed(before, after):
    """The first thing that differs between two snapshots, or None."""
    if before["state"].keys() != after["state"].keys():
        return "state-dict keys"
    for key, value in before["state"].items():
        if not torch.equal(value, after["state"][key]) and not value.isnan().any():
            return f"value of {key}"
    return next((n for n in before if n != "state" and before[n] != after[n]), None)
