"""All checks of one model type, and the verdict."""

import re

import hf_hyperattn as ha
from hf_hyperattn.integration.attention.hosts import find_hosts
from hf_hyperattn.integration.patching.unsupported import has_attention
from tests.zoo.compare import changed, finite, gap, run, snapshot
from tests.zoo.overrides import REASONS
from tests.zoo.patched import patch_checks
from tests.zoo.probe import counted, guarded, line, strays, types_in
from tests.zoo.tiny import build, tiny

NAME = "cone"


def by_name(kind, model_type, one):
    """Loads under our name with our function called and finite outputs, or is refused with an error naming it."""
    try:
        _, model = build(kind, model_type, attn_implementation=NAME)
    except ValueError as error:
        return "refused", line(error)
    with counted(NAME) as modules:
        out = run(model, one.inputs)
    if not modules:
        return False, f"accepted, but the function of {NAME!r} was never called"
    if not finite(out):
        return False, "outputs are not finite"
    hosts = sum(1 for _ in find_hosts(model))
    seen = "" if gap(out, run(one.model, one.inputs)) else ", which the outputs do not show"
    left = strays(model)
    kept = f"; as before: {', '.join(left)}" if left else ""
    return True, f"{len({id(m) for m in modules})} of {hosts} hosts ran{seen}{kept}"


def refusals(kind, model_type, one, message):
    """A refused type is refused on every way in, by an error that names it; a patch may still reach its hosts."""
    messages = {"attn_implementation=": message}
    fresh = build(kind, model_type)[1]
    before = snapshot(fresh)
    try:
        fresh.set_attn_implementation(NAME)
    except ValueError as error:
        messages["set_attn_implementation"] = line(error)
    else:
        return False, f"set_attn_implementation accepts what is refused at loading: {message}"
    if changed(before, snapshot(fresh)) is not None:
        return (
            False,
            f"set_attn_implementation refuses, but leaves another {changed(before, snapshot(fresh))} behind",
        )
    try:
        ha.patch_model(fresh, ha.ConeConfig())
    except ValueError as error:
        messages["patch_model"] = line(error)
    known = [re.escape(t) for t in types_in(one.config) if t]
    for way, text in messages.items():
        if not re.search(rf"(?<![\w-])({'|'.join(known)})(?![\w-])", text):
            return False, f"{way} does not name the family: {text}"
    return "patch_model" in messages, message


def examine(kind, model_type):
    """All checks of one model type, and the verdict."""
    try:
        one, out = tiny(kind, model_type)
    except Exception as error:
        return {"verdict": "not built", "why": REASONS.get(model_type) or line(error), "checks": {}}
    facts = {
        "class": type(one.model).__name__,
        "parameters": sum(p.numel() for p in one.model.parameters()),
        "inputs": sorted(one.inputs),
    }
    if gap(out, run(one.model, one.inputs)):
        return facts | {
            "verdict": "not built",
            "why": "the stock model is not deterministic",
            "checks": {},
        }
    holds, why = guarded(by_name, kind, model_type, one)
    if holds != "refused":
        return facts | judged({"by_name": (holds, why)} | patch_checks(kind, one), "works")
    message = why
    whole, why = guarded(refusals, kind, model_type, one, message)
    if whole:
        return facts | {
            "verdict": "refused" if has_attention(one.model) else "no attention",
            "why": why,
            "checks": {},
        }
    if why != message:
        return facts | {"verdict": "failure", "why": why, "checks": {}}
    return facts | judged({"by_name": (None, message)} | patch_checks(kind, one), "patched only")


def judged(checks, verdict):
    """The verdict, unless a check says no."""
    broken = [n for n, (ok, _) in checks.items() if ok is False]
    why = "; ".join(f"{n}: {checks[n][1]}" for n in broken)
    return {"verdict": "failure" if broken else verdict, "why": why, "checks": checks}
