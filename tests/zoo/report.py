"""docs/compatibility.md out of the zoo's results."""

import collections
import re

from tests.zoo.patched import PATCHES

#: What head_fusion says of layers that are called with hidden states in another form than one row a query.
SHAPES = re.compile(
    r"\w+ was called with hidden states (of shape \([\d, ]+\)|none) for \d+ queries"
)

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
SHORT, LONGEST = 50, 200  # characters: of a reason that stands in its table, and of any cell
#: What every refusal says around its reason.
AROUND = re.compile(
    r"(\w+Error: )?attn_implementation='cone' cannot be used with model type '[^']*': (.*?)"
    r"; use a family listed as working in docs/compatibility\.md, or attn_implementation='sdpa'$"
)
HEAD = """# Compatibility

Written by `make zoo`, which builds a tiny random model of every model type of the installed Transformers and checks
it with {patches}, each by itself: transformers {transformers}, torch {torch}, Python {python}, on a CPU, in float32.

{columns}

"Note 3" is the third of the reasons at the end of the page.

**Reload.** Weights are bitwise equal: every process that loads the file gets the same bits, and the bits of the model
that was saved where weights lie as they lay there. PyTorch rounds products of single rows otherwise where a file maps
them to odd addresses, of stock models too; `copy.deepcopy(model)` moves them.

`-` means that the check does not apply; the note says why unless the model just does not generate. Composite models
that accept text alone are checked with text alone; "2 of 4 hosts ran" then tells that some attention modules, such
as those of a vision tower, were patched but not run. "refused" names a mechanism that says of itself, in one line, that
it has no meaning for such a module, as Hierarchical Self-Attention says of logits with a softcap; that tying both
sides ("hsa, both") is for bidirectional attention alone, and collaborative heads for attention without rotary
positions, is not noted. Sparse rules are checked in causal layers only. "as before" lists attention modules inside a
model that works which compute what they always did: pooling heads, linear and deformable attention, and the like.
"""
COLUMNS = {
    "by name": '`from_config(..., attn_implementation="cone")` works, our function is called, outputs are finite',
    "identity": "right after `patch_model` outputs are the stock ones to 1e-5 of their "
    "magnitude, with and without gradients",
    "gradients": "every added parameter of an attention module that ran gets a finite gradient",
    "unpatch": "`unpatch_model` restores classes, state-dict keys and values, configs and hooks; outputs are bitwise "
    "the stock ones",
    "reload": "saved with open gates and taken back by plain `from_pretrained`, weights are bitwise equal, outputs to "
    "1e-6; see below",
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
    notes: dict[str, int] = {}
    lines = [
        HEAD.format(columns=columns(), patches="; ".join(PATCHES), **versions),
        "## Totals",
        "",
        "| | " + " | ".join(AUTO[k] for k in kinds) + " | meaning |",
        "| --- |" + " --- |" * (len(kinds) + 1),
    ]
    for verdict, meaning in VERDICTS.items():
        lines.append(
            f"| {verdict} | "
            + " | ".join(str(totals(results, k)[verdict]) for k in kinds)
            + f" | {meaning} |"
        )
    lines.append(
        "| all | " + " | ".join(str(sum(totals(results, k).values())) for k in kinds) + " | |"
    )
    for kind in kinds:
        lines += [
            "",
            f"## {AUTO[kind]}",
            "",
            "| model type | verdict | "
            + " | ".join(c.replace("_", " ") for c in CHECKS)
            + " | note |",
            "| --- | --- |" + " --- |" * (len(CHECKS) + 1),
        ]
        lines += [row(t, r, notes) for (k, t), r in sorted(results.items()) if k == kind]
    lines += ["", "## Notes", "", *(f"{number}. {text}" for text, number in notes.items())]
    return "\n".join(lines) + "\n"


def row(model_type, result, notes):
    """One model type; `notes` gets the reasons that are too long for a table, with their numbers."""
    cells = [
        {True: "yes", False: "**no**", None: "-"}[result["checks"][c][0]]
        if c in result["checks"]
        else ""
        for c in CHECKS
    ]
    parts = [
        part if len(part) <= SHORT else f"note {notes.setdefault(part, len(notes) + 1)}"
        for part in note(result)
    ]
    return (
        f"| {model_type} | {result['verdict']} | " + " | ".join(cells) + f" | {'; '.join(parts)} |"
    )


def note(result):
    """The reasons, in words that do not break a table; those that several checks share once."""
    shared = {}
    for check, (holds, why) in result["checks"].items():
        if holds is False or (holds is None and why not in ORDINARY):
            shared.setdefault(why, []).append(check.replace("_", " "))
    found = [f"{', '.join(checks)}: {reason(why)}" for why, checks in shared.items()]
    if result["why"] and not any(holds is False for holds, _ in result["checks"].values()):
        found.insert(0, reason(result["why"]))  # of checks that fail it only repeats what they say
    ran = re.match(
        r"(\d+) of (\d+) hosts ran(.*)", result["checks"].get("by_name", ("", ""))[1] or ""
    )
    if ran and (ran[1] != ran[2] or ran[3]):
        found += ran[0].split("; ")
    return [re.sub(r"\s+", " ", part).replace("|", "\\|") for part in found]


def reason(why):
    """What an error says, without the words that stand around it in every refusal and differ from type to type."""
    match = AROUND.match(why)
    missing = re.match(r"ImportError: \w+ requires the (\w+) library", why)
    if match or missing:
        return match[2] if match else f"it needs the package {missing[1]}, which was not installed"
    refusals = re.split(
        r"; (?=[\w +,]+ refused: )", SHAPES.sub("hidden states came in another form", why)
    )
    if len(refusals) > 1 and refusals[0].startswith("refused: "):
        del refusals[0]  # what the first mechanism says, which follows under its name
    return "; ".join(re.sub(r"; allowed: .*|ValueError: ", "", part) for part in refusals)
