"""`hyperattn look`: one HTML page, and JSON beside it, of what a model's attention does on a text."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

from .. import address
from ..analysis.attention import attention_report
from ..folders import replace_folder
from ..integration import describe
from ..integration.checkpoint_files import class_of, errors_as, load_config
from ..integration.stock import OURS, PATCHED, RUNNING
from ..selection import normalize_choice, resolve_numbers
from .inputs import MIN_TOKENS, check_folder, quiet, read_text, read_tokenizer, window_of

#: Names of mechanisms, which a config may have as its attention.
BY_NAME = OURS - {PATCHED, RUNNING}
PAGE, DATA = "look.html", "look.json"
#: Where the page has its data.
PLACE = "/*DATA*/null"
LENGTH = 256
CHARACTERS = 64  # of the text are read for a token; texts have about 4
#: The recipe that trains a mechanism.
RECIPE = "accelerate launch recipes/finetune.py --config recipes/smollm2/{}.yaml"
RECIPES = ("cone", "head_fusion", "hype", "hyperbolic", "mkl", "talking_heads", "trilinear")
#: A head that gives the first token more of its attention than this mostly rests there.
RESTING = 0.5
#: Hidden states whose delta differs from their control's by less count for neither side.
MARGIN = 0.1
#: Of the sign test.
LEVEL = 0.05


def run(args: argparse.Namespace) -> None:
    """Measure and write; raises ValueError or OSError for bad input."""
    quiet()
    check_folder("--out", args.out)
    config = load_config(args.model, args.model)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{args.model} has an encoder and a decoder; allowed: a decoder or an encoder of one stack"
        )
    length = window_of(config, args.length, LENGTH)
    text, name = read_text(args.text, CHARACTERS * length)
    tokenizer = read_tokenizer(args.model, args.model)
    ids = tokenizer(text, truncation=True, max_length=length)["input_ids"]
    if len(ids) < MIN_TOKENS:
        raise ValueError(f"the text {name} has {len(ids)} tokens; allowed: {MIN_TOKENS} or more")
    if args.query is not None and args.query >= len(ids):
        raise ValueError(f"--query {args.query} is not in the text; allowed: 0 to {len(ids) - 1}")
    layers = layers_of(args.layers, config)
    data = report(args, load(args.model, config), tokenizer, ids, name, layers)
    with replace_folder(args.out) as stage:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        (stage / DATA).write_text(text + "\n", encoding="utf-8")
        (stage / PAGE).write_text(page(text), encoding="utf-8")
    said = {
        "page": os.path.join(args.out, PAGE),
        "data": os.path.join(args.out, DATA),
        "next": data["next"],
    }
    print(json.dumps(said, indent=2) if args.json else lines(data, said))


def layers_of(option: str | None, config: Any) -> list[int] | None:
    """The layers that --layers means, by number."""
    if option is None:
        return None
    count = getattr(config.get_text_config(), "num_hidden_layers", 0)
    words = [word.strip() for word in option.split(",")]
    if all(word.lstrip("-").isdecimal() for word in words):
        chosen = resolve_numbers(list(range(count)), tuple(int(word) for word in words))
    else:
        chosen = resolve_numbers(list(range(count)), normalize_choice("--layers", option))
    strange = [n for n in chosen if not 0 <= n < count]
    if strange or not chosen:
        what = f"layer {strange[0]}, which" if strange else "nothing that"
        raise ValueError(
            f"--layers {option!r} names {what} the model does not have; allowed: 0 to {count - 1}"
        )
    return chosen


def load(path: str, config: Any) -> Any:
    """The model, such that it returns attention weights: those of a mechanism's name, or eager ones."""
    by_name = getattr(config, "_attn_implementation", None) in BY_NAME
    with errors_as(f"{path}: cannot load it"):
        settings = {} if by_name else {"attn_implementation": "eager"}
        return class_of(config).from_pretrained(path, dtype="float32", **settings)


def report(
    args: argparse.Namespace, model: Any, tokenizer: Any, ids: list[int], text: str, layers
) -> dict:
    """What the page shows."""
    with errors_as(f"{args.model}: cannot look at it"):
        spaced = {len(ids) * i // 8 - 1 for i in range(1, 9)}
        queries = None if args.query is None else sorted({args.query, *spaced})
        data = attention_report(model, ids, layers=layers, queries=queries)
    facts = describe(model)
    name = getattr(model.config, "_attn_implementation", None)
    by_name = name if name in BY_NAME else None
    return {
        "made_by": f"{address.NAME} {address.VERSION}",
        "model": args.model if not Path(args.model).is_dir() else Path(args.model).resolve().name,
        "class": facts["model"],
        "text": text,
        "query": args.query,
        "patched": facts["patched"],
        "mode": facts["mode"],
        "mechanisms": facts["mechanisms"],
        "by_name": by_name,
        "parameters": facts["parameters"],
        "parameters_added": facts["parameters_added"],
        **data,
        "tokens": [tokenizer.decode([i]) for i in ids],
        "next": suggestions(args, data, by_name is not None),
    }


def page(data: str) -> str:
    """The template with the data in it, as JSON in which no tag can begin."""
    template = (Path(__file__).parent / PAGE).read_text(encoding="utf-8")
    return template.replace(
        PLACE,
        data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    )


def lines(data: dict[str, Any], said: dict[str, Any]) -> str:
    """What the command prints: where the page is, and what to try next."""
    patched = f"{data['patched']} of {len(data['hosts'])} layers patched"
    head = f"{data['model']}: {len(data['tokens'])} tokens of {data['text']}, {patched}\nwritten: {said['page']}"
    return "\n".join([head, *(f"\n{step['text']}\n    {step['command']}" for step in said["next"])])


def suggestions(
    args: argparse.Namespace, data: dict[str, Any], by_name: bool
) -> list[dict[str, str]]:
    """What to try next, from what was measured: a sentence and a command each."""
    patched = {name for host in data["hosts"] for name in host["mechanisms"]}
    if by_name and not patched:
        steps = [("What the model has, layer by layer:", command("describe", args.model))]
    else:
        steps = of_patched(args, data, patched) if patched else of_unpatched(args, data)
    return [{"text": text, "command": command} for text, command in steps]


def of_unpatched(args: argparse.Namespace, data: dict[str, Any]) -> list[tuple[str, str]]:
    """What could be patched in."""
    shares = [share for layer in data["sink"]["model"] for share in layer or ()]
    resting = sum(share > RESTING for share in shares)
    steps = [
        (
            f"{resting} of {len(shares)} heads give the first token more than half of their attention. How many pairs "
            "of tokens the model can leave out, head by head and without training:",
            command(
                "inject",
                args.model,
                "--mechanism",
                "hsa",
                "--text",
                args.text,
                "--output",
                f"{stem(args)}-hsa",
            ),
        )
    ]
    nearer, farther, places = count_sides(data["hyperbolicity"])
    tree_like = is_clearly_more(nearer, farther)
    text = (
        f"Of {places} places, hidden states are at least 10 % nearer to a tree than their control in {nearer}, and at "
        f"least 10 % farther in {farther}"
    )
    if tree_like:
        text += ": clearly more often nearer (sign test, p < 0.05). Whether distances in a curved space help,"
    else:
        text += ": not clearly more often nearer (sign test, p < 0.05). Whether cones help all the same,"
    text += " from an unchanged start (in a clone; the recipe names its model):"
    return [*steps, (text, RECIPE.format("hyperbolic" if tree_like else "cone"))]


def count_sides(states: list[dict[str, Any]]) -> tuple[int, int, int]:
    """In how many places hidden states are clearly nearer to a tree than their control, in how many farther, of all."""
    means = [(state["mean"], state["control_mean"]) for state in states]
    nearer = sum(mean < (1 - MARGIN) * control for mean, control in means)
    farther = sum(mean > (1 + MARGIN) * control for mean, control in means)
    return nearer, farther, len(means)


def is_clearly_more(nearer: int, farther: int) -> bool:
    """Whether one side wins by a one-sided sign test: fair coins would give as many in less than 5 % of cases."""
    tosses = nearer + farther
    as_many = sum(math.comb(tosses, heads) for heads in range(nearer, tosses + 1))
    return as_many < LEVEL * 2**tosses


def of_patched(
    args: argparse.Namespace, data: dict[str, Any], patched: set[str]
) -> list[tuple[str, str]]:
    """What to do with what is patched in."""
    steps, gates = (
        [],
        {name: rows for name, rows in data["values"].items() if name.endswith("gate")},
    )
    moved = max(
        (abs(g) for rows in gates.values() for row in rows for g in row or ()), default=None
    )
    recipe = next((name for name in RECIPES if name in patched), None)
    if moved == 0:
        text = "No gate has moved: the model computes what it did before. Train it (in a clone; the recipe names its"
        steps.append((f"{text} model):", RECIPE.format(recipe or "cone")))
    elif moved is not None:
        layer, size = strongest(gates)
        text = (
            f"Gates have moved most in layer {layer} (mean size {size:.3g}). Values of every head:"
        )
        steps.append((text, command("describe", args.model, "--heads")))
    if "hsa" in patched:
        length = f"{2 * data['tokens']}"
        text = (
            "Blocks close only away from the query. Twice the length, where model and text have it:"
        )
        steps.append(
            (
                text,
                command(
                    "look", args.model, "--text", args.text, "--out", args.out, "--length", length
                ),
            )
        )
    if moved != 0:
        text = "To share it, check first that it reloads exactly:"
        steps.append((text, command("push", args.model, f"your-name/{stem(args)}", "--dry-run")))
    return steps


def strongest(gates: dict[str, list]) -> tuple[int, float]:
    """The layer whose gates are farthest from 0, by the mean of their sizes, and that mean."""
    sizes: dict[int, list[float]] = {}
    for rows in gates.values():
        for layer, row in enumerate(rows):
            sizes.setdefault(layer, []).extend(map(abs, row or ()))
    means = {layer: sum(values) / len(values) for layer, values in sizes.items() if values}
    layer = max(means, key=lambda i: means[i])
    return layer, means[layer]


def command(*words: object) -> str:
    """A line of the command, quoted for a shell."""
    return shlex.join(["hyperattn", *map(str, words)])


def stem(args: argparse.Namespace) -> str:
    """The last part of the model's name."""
    return os.path.basename(os.path.abspath(args.model))
