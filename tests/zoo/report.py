"""docs/compatibility.md out of the zoo's results."""

import collections
import re

from tests.zoo.patched import PATCHES

VERDICTS = {
    "works": "loads by name, and every check that applies holds",
    "patched only": "refused by name for a part out of reach; `patch_model` changes the rest, and those checks hold",
    "refused": "has attention out of reach; every way in raises an error that names it",
    "no attention": "nothing to change; every way in raises an error that names it",
    "not built": "no tiny random model could be built or run here, for the reason given",
    "failure": "accepted, but a check does not hold",
}
CHECKS = ("by_name", "identity", "gradients", "unpatch", "reload", "generation")
AUTO = {"base": "AutoModel", "causal": "AutoModelForCausalLM"}
ORDINARY = ("does not generate",)  # not worth a note
HEAD = """# Compatibility

Written by `make zoo`, which builds a tiny random model of every model type of the installed Transformers and checks
it with {patches}, each by itself: transformers {transformers}, torch {torch}, Python {python}, on a CPU, in float32.

{columns}

`-` means that the check does not apply; the note says why unless the model just does not generate. Composite models
that accept text alone are checked with text alone; "2 of 4 hosts ran" then tells that some attention modules, such
as those of a vision tower, were patched but not run. "refused" names a mechanism that says of itself, in one line, that
it has no meaning for such a module, as Hierarchical Self-Attention says of logits with a softcap; that tying both
sides ("hsa, both") is for bidirectional attention alone, and collaborative heads for attention without rotary
positions, is not noted. "as before" lists attention modules inside a
model that works which compute what they always did: pooling heads, linear and deformable attention, and the like.
"""
COLUMNS = {
    "by name": '`from_config(..., attn_implementation="cone")` works, our function is called, outputs are finite',
    "identity": "right after `patch_model` outputs are the stock ones to 1e-5 of their "
    "magnitude, with and without gradients",
    "gradients": "every added parameter of an attention module that ran gets a finite gradient",
    "unpatch": "`unpatch_model` restores classes, state-dict keys and values, configs and hooks; outputs are bitwise "
    "the stock ones",
    "reload": "saved with open gates and taken back by plain `from_pretrained`, weights are bitwise equal and outputs "
    "to 1e-6: every process that loads the file gets the same bits, and the bits of the model that was saved where "
    "weights lie as they lay there (PyTorch rounds products of single rows otherwise where a file maps them to odd "
    "addresses, of stock models too; `copy.deepcopy(model)` moves them)",
    "generation": "greedy generation with open gates is the same with and without a cache",
}


def columns():
    """What the columns of the big tables mean, as a table."""
    rows = ["| column | what holds where it says yes |", "| --- | --- |"]
    return "\n".join(rows + [f"| {name} | {meaning} |" for name, meaning in COLUMNS.items()])


def totals(results, kind):
    """Verdict -> number of model types."""
    counts = collections.Counter(r["verdict"] for (k, _), r in results.items() if k == kind)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def page(results, versions):
    """The whole page, as Markdown."""
    kinds = list(dict.fromkeys(kind for kind, _ in results))
    lines = [
        HEAD.format(columns=columns(), patches=", ".join(PATCHES), **versions),
        "## Totals",
        "",
        "| | " + " | ".join(AUTO[k] for k in kinds) + " | meaning |",
        "| --- |" + " --- |" * (len(kinds) + 1),
    ]
    for verdict, meaning in VERDICTS.items():
        lines.append(
            f"| {verdict} | " + " | ".join(str(totals(results, k)[verdict]) for k in kinds) + f" | {meaning} |"
        )
    lines.append("| all | " + " | ".join(str(sum(totals(results, k).values())) for k in kinds) + " | |")
    for kind in kinds:
        lines += [
            "",
            f"## {AUTO[kind]}",
            "",
            "| model type | verdict | " + " | ".join(c.replace("_", " ") for c in CHECKS) + " | note |",
            "| --- | --- |" + " --- |" * (len(CHECKS) + 1),
        ]
        lines += [row(t, r) for (k, t), r in sorted(results.items()) if k == kind]
    return "\n".join(lines) + "\n"


def row(model_type, result):
    """One model type."""
    cells = [
        {True: "yes", False: "**no**", None: "-"}[result["checks"][c][0]] if c in result["checks"] else ""
        for c in CHECKS
    ]
    return f"| {model_type} | {result['verdict']} | " + " | ".join(cells) + f" | {note(result)} |"


def note(result):
    """Reasons, in words that do not break a table."""
    found = [result["why"]] if result["why"] else []
    found += [
        f"{c.replace('_', ' ')}: {why}"
        for c, (holds, why) in result["checks"].items()
        if holds is None and why not in ORDINARY
    ]
    ran = re.match(r"(\d+) of (\d+) hosts ran(.*)", result["checks"].get("by_name", ("", ""))[1] or "")
    if ran and (ran[1] != ran[2] or ran[3]):
        found.append(ran[0])
    return re.sub(r"\s+", " ", "; ".join(found)).replace("|", "\\|")
