"""docs/compatibility.md out of the zoo's results."""

import collections
import re
import textwrap

from tests.zoo.patched import PATCHES

#: What head_fusion says of layers that are called with hidden states in another form than one row a query.
SHAPES = re.compile(
    r"\w+ was called with hidden states (of shape \([\d, ]+\)|none) for \d+ queries"
)

VERDICTS = {
    "works": "loads by name, and every check that applies holds",
    "patched only": "not by name, as one part is out of reach; patching works",
    "refused": "attention is out of reach; an error names it",
    "no attention": "nothing to change; an error names it",
    "not built": "no tiny random model could be built or run here",
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

Which model types of Transformers work? `make zoo` built a tiny random model of every type and checked it with each of
these: {patches}. It wrote this page with transformers {transformers}, torch {torch}, Python {python}, on a CPU, in
float32.

## What the columns mean

{columns}

- **-** means that the check does not apply. The note says why, unless the model just does not generate.
- **note 3** is the third of the notes at the end of the page.
- **2 of 4 hosts ran**: some attention modules, such as those of a vision tower, were patched but not run. Composite
  models that accept only text are checked with only text. "Unseen" hosts ran without an effect on the outputs.
- **refused** names a mechanism that has no meaning for such a module, and says so in one line. For example,
  Hierarchical Self-Attention refuses logits with a softcap.
- **as before** lists attention modules that still compute what they did, such as pooling heads, linear and deformable
  attention.

Two refusals have no note. Tying both sides ("hsa, both") is only for bidirectional attention, and collaborative heads
are only for attention without rotary positions. Sparse rules are checked in causal layers only.

**Reload.** Every process that loads the file gets the same bits. They are the bits of the saved model if its weights
lie at the same alignment in memory. PyTorch rounds products of single rows otherwise if a file maps weights to odd
addresses, also in stock models. `copy.deepcopy(model)` moves them.
"""
COLUMNS = {
    "by name": '`from_config(..., attn_implementation="cone")` works. Our function is called, and outputs are '
    "finite.",
    "identity": "right after `patch_model`, outputs are the stock ones to 1e-5 of their magnitude, with and without "
    "gradients.",
    "gradients": "every added parameter of an attention module that ran gets a finite gradient.",
    "unpatch": "`unpatch_model` restores classes, state-dict keys and values, configs and hooks. Outputs are bitwise "
    "the stock ones.",
    "reload": "the model is saved with open gates and loaded by plain `from_pretrained`. Weights are bitwise "
    "equal, outputs to 1e-6.",
    "generation": "greedy generation with open gates is the same with and without a cache.",
}


def columns():
    """Return the meaning of the columns of the big tables, as a list."""
    return "\n".join(
        textwrap.fill(
            f"- **{name}**: {meaning}", 120, subsequent_indent="  ", break_on_hyphens=False
        )
        for name, meaning in COLUMNS.items()
    )


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
    lines += ["", "## Notes", "", *(write_note(number, text) for text, number in notes.items())]
    return "\n".join(lines) + "\n"


def write_note(number, text):
    """Return a note as Markdown: one item, with an item below it for each mechanism if several refuse."""
    checks, *refusals = re.split(r"(?:^|: |; )(?=[\w +,]+ refused: )", text)
    if len(refusals) < 2:
        return f"{number}. {text}"
    return "\n".join([f"{number}. {checks}:", *(f"    - {refusal}" for refusal in refusals)])


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
        found += ran[0].replace(", which the outputs do not show", ", unseen").split("; ")
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
