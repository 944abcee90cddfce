"""What must hold of a patched model; every check answers yes, no or not applicable (None), with a reason."""

import copy
import json
import os
import re
import tempfile

import torch

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import Pages
from tests.zoo.compare import TOLERANCE, changed, gap, run, snapshot
from tests.zoo.probe import counted, guarded, line, stir
from tests.zoo.tiny import KINDS

PATCHED = "hf_hyperattn"
#: Of outputs whose weights are equal to the bit.
ROUNDING = 1e-6
NEW_TOKENS = 5
HSA = ("hsa", "HsaConfig")
RULE = ha.SparseConfig(Pages(near=2, page=2, top=1))
NOWHERE = "chooses no attention module"
#: Said of so many hosts that a note says nothing: tying both sides of causal ones, sharing heads of rotary ones, and
#: models without a causal layer, in which sparse rules are checked.
COMMON = ("ties queries too", "rotary", NOWHERE)

#: What is patched in, each in its turn, with the mechanisms that have no meaning for some hosts, and say so.
PATCHES = {
    "cone + head_fusion": ((ha.ConeConfig(), ha.HeadFusionConfig()), ("head_fusion",)),
    "hyperbolic + talking_heads": (
        (ha.HyperbolicConfig(aggregation="mean"), ha.TalkingHeadsConfig()),
        (),
    ),
    "HyPE + mkl": (
        (ha.HypeConfig(max_length=64), ha.MklConfig(kind="conditional")),
        ("hype", "mkl"),
    ),
    "hyperbolic, midpoint": ((ha.HyperbolicConfig(distance="squared_lorentz"),), ()),
    "trilinear": ((ha.TrilinearConfig(windows=(4, 3)),), ("trilinear",)),
    "collaborative": ((ha.CollaborativeConfig(),), ("collaborative",)),
    "hsa": ((ha.HsaConfig(windows=(2, 4), near=2, sinks=1, refine_top_k=1),), HSA),
    "hsa, both": ((ha.HsaConfig(windows=(2, 4), tying="both"),), HSA),
    "sparse": (
        (ha.HyperAttnConfig([RULE], layers=lambda host: host.is_causal),),
        ("sparse", NOWHERE),
    ),
}


def identity(one, configs):
    """Right after patching, outputs are those from before, with and without gradients."""
    stock = run(one.model, one.inputs)
    ha.patch_model(one.model, *configs)
    try:
        worst = max((gap(stock, run(one.model, one.inputs, grad)), grad) for grad in (False, True))
    finally:
        ha.unpatch_model(one.model)
    value, grad = worst
    return (
        value <= TOLERANCE,
        f"largest difference {value:.1e} ({'with' if grad else 'without'} gradients)",
    )


def gradients(one, configs):
    """Every added parameter of a host that ran gets a finite gradient, and gates are not all zero."""
    ha.patch_model(one.model, *configs)
    try:
        with counted(PATCHED) as modules:
            out = run(one.model, one.inputs, grad=True)
        used = [v for v in out.values() if v.requires_grad]
        if not used:
            return None, "no output carries a gradient"
        sum((torch.where(v.isfinite(), v, 0).float() ** 2).mean() for v in used).backward()
        added = [
            p
            for m in {id(m): m for m in modules}.values()
            if "hyper" in m._modules
            for p in m.hyper.parameters()
        ]
        grads = [p.grad for p in added]
    finally:
        one.model.zero_grad(set_to_none=True)
        ha.unpatch_model(one.model)
    if not added:
        return False, "no patched host ran"
    missing = sum(g is None for g in grads)
    bad = sum(not bool(g.isfinite().all()) for g in grads if g is not None)
    if bad:
        return False, f"{bad} of {len(added)} gradients are not finite"
    if not any(bool(g.any()) for g in grads if g is not None):
        return (
            None,
            "all gradients are zero: the outputs do not depend on what attention attends to",
        )
    if missing and not stock_reaches(one):
        return None, "not every attention module reaches the outputs"
    return not missing, f"{missing} of {len(added)} parameters got none"


def stock_reaches(one):
    """Whether every stock attention parameter that ran reaches the outputs, so that ours must too."""
    with counted("sdpa") as modules:
        out = run(one.model, one.inputs, grad=True)
    sum(
        (torch.where(v.isfinite(), v, 0).float() ** 2).mean()
        for v in out.values()
        if v.requires_grad
    ).backward()
    reached = all(p.grad is not None for m in modules for p in m.parameters())
    one.model.zero_grad(set_to_none=True)
    return reached


def unpatch(one, configs):
    """Unpatching gives back the model from before, bit for bit."""
    before, stock = snapshot(one.model), run(one.model, one.inputs)
    ha.patch_model(one.model, *configs)
    stir(one.model)
    patched = run(one.model, one.inputs)
    ha.unpatch_model(one.model)
    what = changed(before, snapshot(one.model))
    if what is not None:
        return False, f"not restored: {what}"
    difference = gap(stock, run(one.model, one.inputs))
    if difference:
        return False, f"outputs differ by {difference:.1e} after unpatching"
    return True, "restored" if gap(
        stock, patched
    ) else "restored; open gates had not changed the outputs"


def reloaded(model, kind, inputs, directory):
    """How far the outputs of a saved and reloaded model are from its own.

    Both get their tensors copied before, the other one three times: kernels round otherwise at odd addresses, and a
    model that picks the best of many makes much of it.
    """
    model.save_pretrained(directory)
    other = KINDS[kind][0].from_pretrained(directory).eval()
    mine, theirs = model.state_dict(), other.state_dict()
    if mine.keys() != theirs.keys() or not all(
        torch.equal(v, theirs[k]) or v.isnan().any() for k, v in mine.items()
    ):
        return float("inf")
    for one in (model, other):
        for tensor in (*one.parameters(), *one.buffers()):
            tensor.data = tensor.data.clone()
    return min(gap(run(model, inputs), run(copy.deepcopy(other), inputs)) for _ in range(3))


def reload(one, configs, kind):
    """Saved with open gates and taken back by plain `from_pretrained`, it computes the same."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        tempfile.TemporaryDirectory(dir=place) as stock,
        tempfile.TemporaryDirectory(dir=place) as ours,
    ):
        try:
            difference = reloaded(one.model, kind, one.inputs, stock)
        except Exception as error:
            return None, f"the stock model does not reload: {line(error)}"
        if difference > ROUNDING:
            return None, f"the stock model reloads with a difference of {difference:.1e}"
        ha.patch_model(one.model, *configs)
        try:
            stir(one.model)
            difference = reloaded(one.model, kind, one.inputs, ours)
            with open(os.path.join(ours, "config.json")) as file:
                keys = {"hyperattn", "attn_implementation"} & json.load(file).keys()
        finally:
            ha.unpatch_model(one.model)
    if len(keys) < 2:
        return False, f"config.json has only {sorted(keys)}"
    return difference <= ROUNDING, f"difference {difference:.1e}"


def generate(model, inputs, use_cache):
    torch.manual_seed(0)
    out = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, torch.stack(out.logits)


def alike(model, inputs):
    """Whether tokens with and without a cache are the same, and how far their logits are apart."""
    (ids, logits), (others, other_logits) = (generate(model, inputs, use) for use in (True, False))
    return torch.equal(ids, others), (logits - other_logits).abs().max().item()


def generation(one, configs):
    """Greedy generation with open gates is the same with and without a cache."""
    inputs = {n: v for n, v in one.inputs.items() if n not in ("decoder_input_ids", "use_cache")}
    if not one.model.can_generate() or not inputs:
        return None, "does not generate"
    try:
        same, apart = alike(one.model, inputs)
    except Exception as error:
        return None, f"the stock model does not generate from these inputs: {line(error)}"
    if not same or apart > 1e-3:
        return None, "the stock model generates differently with and without a cache"
    ha.patch_model(one.model, *configs)
    try:
        stir(one.model)
        same, apart = alike(one.model, inputs)
    finally:
        ha.unpatch_model(one.model)
    return same, f"{NEW_TOKENS} tokens, logits within {apart:.1e}"


def refuses(why, names):
    """Whether one of the mechanisms says, by name and with what can be done, that a host is nothing for it."""
    found = re.search(r"ValueError: .*(allowed: |leave these layers out)", why)
    return bool(found) and any(re.search(rf"\b{name}\b", why) for name in names)


def patch_checks(kind, one):
    """What must hold of the patched model, whatever is patched in."""
    answers = {name: {} for name in ("identity", "gradients", "unpatch", "reload", "generation")}
    for label, (configs, refusing) in PATCHES.items():
        for check in (identity, gradients, unpatch, reload, generation):
            further = (kind,) if check is reload else ()
            answer = guarded(check, one, configs, *further)
            if getattr(one.model.config, "hyperattn", None) is not None:  # the check broke off
                ha.unpatch_model(one.model)
            if answer[0] is False and refuses(answer[1], refusing):
                answer = None, f"refused: {answer[1]}"
            answers[check.__name__][label] = answer
    return {name: together(found) for name, found in answers.items()}


def together(found):
    """One answer for all patches: a no from any, else what the first says; a no and a refusal are told apart."""
    no = [f"{label}: {why}" for label, (holds, why) in found.items() if holds is False]
    if no:
        return False, "; ".join(no)
    refused = [
        f"{label} {why}"
        for label, (_, why) in found.items()
        if why.startswith("refused: ") and not any(common in why for common in COMMON)
    ]
    first = next(iter(found.values()))
    return first[0], "; ".join([first[1], *refused])
