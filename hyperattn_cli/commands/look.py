"""`hyperattn look`: write a page about a model's attention on a text.

The page template is `look.html`. The command also suggests next steps from the measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

from hf_hyperattn import address
from hf_hyperattn.analysis.attention import attention_report
from hf_hyperattn.config.choice import normalize_choice, resolve_numbers
from hf_hyperattn.integration import describe
from hf_hyperattn.integration.attention.stock import OURS, PATCHED, RUNNING
from hf_hyperattn.integration.loading.checkpoint_files import class_of, errors_as, load_config
from hf_hyperattn.utils.folders import replace_folder

from ..shared.inputs import (
    MIN_TOKENS,
    check_folder,
    read_text,
    read_tokenizer,
    silence_transformers,
    window_of,
)
from ..shared.models import causal_config
from ..shared.wrap import wrap_text

#: Values of `attn_implementation` that run a mechanism without a patch.
BY_NAME = OURS - {PATCHED, RUNNING}
PAGE, DATA = "look.html", "look.json"
#: Placeholder in the template that is replaced by the data.
PLACE = "/*DATA*/null"
LENGTH = 256
CHARACTERS = 64  # characters to read per token; texts have about 4
#: Share of attention to the first token above which a head counts as resting there.
RESTING = 0.5
#: Relative difference from the control below which hidden states count for neither side.
MARGIN = 0.1
#: Significance level of the sign test.
LEVEL = 0.05


def run(args: argparse.Namespace) -> None:
    """Measure and write the files; raise ValueError or OSError for bad input."""
    silence_transformers()
    check_folder("--out", args.out)
    config = load_config(args.model, args.model)
    # The page shows one stack of layers, with one text.
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
    # Check all options before the model is loaded.
    layers = parse_layers(args.layers, config)
    data = build_report(args, load_model(args.model, config), tokenizer, ids, name, layers)
    with replace_folder(args.out) as stage:
        # `allow_nan=False`: the browser's JSON parser rejects NaN.
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        (stage / DATA).write_text(text + "\n", encoding="utf-8")
        (stage / PAGE).write_text(fill_page(text), encoding="utf-8")
    result = {
        "page": os.path.join(args.out, PAGE),
        "data": os.path.join(args.out, DATA),
        "next": data["next"],
    }
    print(json.dumps(result, indent=2) if args.json else format_result(data, result))


def parse_layers(option: str | None, config: Any) -> list[int] | None:
    """Return the layer numbers of --layers, or None for the default.

    Raises:
        ValueError: The option is malformed or names a layer that the model does not have.
    """
    if option is None:
        return None
    count = getattr(config.get_text_config(), "num_hidden_layers", 0)
    words = [word.strip() for word in option.split(",")]
    # Numbers, or a name such as last-4. Negative numbers count from the end.
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


def load_model(path: str, config: Any) -> Any:
    """Load the model so that it returns attention weights."""
    by_name = getattr(config, "_attn_implementation", None) in BY_NAME
    with errors_as(f"{path}: cannot load it"):
        # SDPA returns no weights; a mechanism chosen by name computes its own.
        settings = {} if by_name else {"attn_implementation": "eager"}
        return class_of(config).from_pretrained(path, dtype="float32", **settings)


def build_report(
    args: argparse.Namespace, model: Any, tokenizer: Any, ids: list[int], text: str, layers
) -> dict:
    """Measure the model and return the data of the page."""
    with errors_as(f"{args.model}: cannot look at it"):
        # Eight evenly spaced queries, in addition to the one of --query.
        spaced = {len(ids) * i // 8 - 1 for i in range(1, 9)}
        queries = None if args.query is None else sorted({args.query, *spaced})
        data = attention_report(model, ids, layers=layers, queries=queries)
    # One page has facts of the patch, measurements, and the text of the tokens.
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
        # Decode one by one, so that the page can label every token.
        "tokens": [tokenizer.decode([i]) for i in ids],
        "next": suggest_steps(args, data, by_name is not None),
    }


def fill_page(data: str) -> str:
    """Return the template with the data inserted."""
    template = (Path(__file__).parent / PAGE).read_text(encoding="utf-8")
    # The data stand in a <script>: "<" could begin a tag, and U+2028 and U+2029 end a line there.
    for character, escaped in (("<", "\\u003c"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029")):
        data = data.replace(character, escaped)
    return template.replace(PLACE, data)


def format_result(data: dict[str, Any], result: dict[str, Any]) -> str:
    """Return the command's output: the path of the page and the next steps."""
    patched = f"{data['patched']} of {len(data['hosts'])} layers patched"
    head = (
        f"{data['model']}, {patched}: read {len(data['tokens'])} tokens of {data['text']}.\n"
        f"Open {result['page']} in a browser. {result['data']} has the same numbers."
    )
    steps = [f"\n{wrap_text('', step['text'])}\n    {step['command']}" for step in result["next"]]
    return "\n".join([head, *steps])


def suggest_steps(
    args: argparse.Namespace, data: dict[str, Any], by_name: bool
) -> list[dict[str, str]]:
    """Suggest next steps from the measurements: a sentence and a command each."""
    patched = {name for host in data["hosts"] for name in host["mechanisms"]}
    if by_name and not patched:
        steps = [
            ("To list the attention layers of the model:", format_command("describe", args.model))
        ]
    else:
        steps = (
            suggest_for_patched(args, data, patched)
            if patched
            else suggest_for_unpatched(args, data)
        )
    return [{"text": text, "command": command} for text, command in steps]


def suggest_for_unpatched(args: argparse.Namespace, data: dict[str, Any]) -> list[tuple[str, str]]:
    """Suggest mechanisms to apply to an unpatched model."""
    # Heads that mostly attend to the first token hardly need the other pairs.
    shares = [share for layer in data["sink"]["model"] for share in layer or ()]
    resting = sum(share > RESTING for share in shares)
    output = f"{get_model_stem(args)}-cheaper"
    skip = (
        f"{resting} of {len(shares)} heads give the first token more than half of their attention. Such heads "
        "need few of the other tokens. To find what every head can skip, without training:"
    )
    # Tree-like hidden states are a hint that hyperbolic attention may help.
    nearer, farther, places = count_sides(data["hyperbolicity"])
    tree_like = is_clearly_more(nearer, farther)
    text = (
        f"Hidden states are at least 10 % more tree-like than their shuffled control at {nearer} of {places} places, "
        f"and at least 10 % less at {farther}. "
    )
    if tree_like:
        text += "That is a hint of hierarchy (sign test, p < 0.05). To test whether hyperbolic distances help:"
    else:
        text += "That is no hint of hierarchy (sign test, p < 0.05). To test whether cones help all the same:"
    return [
        (skip, format_command("inject", args.model, "--text", args.text, "--output", output)),
        (text, suggest_test(args, "hyperbolic" if tree_like else "cone")),
    ]


def suggest_test(args: argparse.Namespace, mechanism: str) -> str:
    """Return the command that compares a mechanism with a control, or that shows how to apply it."""
    try:
        causal_config(args.model)
    except ValueError:
        # `hyperattn compare` trains causal models only.
        return format_command("list", mechanism)
    return format_command(
        "compare", args.model, "--text", args.text, "--mechanisms", f"{mechanism},none"
    )


def count_sides(states: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Compare hidden states with their control at every measured place.

    Returns:
        The number of places that are nearer to a tree by more than `MARGIN`, that are farther by
        more than `MARGIN`, and of all places.
    """
    means = [(state["mean"], state["control_mean"]) for state in states]
    nearer = sum(mean < (1 - MARGIN) * control for mean, control in means)
    farther = sum(mean > (1 + MARGIN) * control for mean, control in means)
    return nearer, farther, len(means)


def is_clearly_more(nearer: int, farther: int) -> bool:
    """Test whether `nearer` is significantly larger than `farther` (sign test).

    The p value is the probability that a fair coin shows heads at least `nearer` times.
    """
    tosses = nearer + farther
    outcomes = sum(math.comb(tosses, heads) for heads in range(nearer, tosses + 1))
    return outcomes < LEVEL * 2**tosses


def suggest_for_patched(
    args: argparse.Namespace, data: dict[str, Any], patched: set[str]
) -> list[tuple[str, str]]:
    """Suggest next steps for a patched model."""
    steps = []
    gates = {name: rows for name, rows in data["values"].items() if name.endswith("gate")}
    sizes = (abs(g) for rows in gates.values() for row in rows for g in row or ())
    # None: no patch has gates (mode "replace"). 0: no gate was trained yet.
    moved = max(sizes, default=None)
    again = ["look", args.model, "--text", args.text, "--out", args.out]
    if moved == 0:
        text = (
            "No gate has moved, so the output is the original model's. Train the model with the Trainer of "
            "Transformers or with PEFT, and look again:"
        )
        steps.append((text, format_command(*again)))
    elif moved is not None:
        layer, size = find_strongest_layer(gates)
        text = f"Gates have moved most in layer {layer} (mean size {size:.3g}). To see the values of every head:"
        steps.append((text, format_command("describe", args.model, "--heads")))
    # Short texts never close a block and fit into windows, so the page would show nothing.
    if patched & {"hsa", "sparse"}:
        text = "On a longer text, heads skip more tokens. If the model and the text allow it:"
        steps.append((text, format_command(*again, "--length", f"{2 * data['tokens']}")))
    # An untrained patch is not worth sharing.
    if moved != 0:
        text = "To share the model, first check that it reloads exactly:"
        steps.append(
            (
                text,
                format_command(
                    "push", args.model, f"your-name/{get_model_stem(args)}", "--dry-run"
                ),
            )
        )
    return steps


def find_strongest_layer(gates: dict[str, list]) -> tuple[int, float]:
    """Return the layer with the largest mean gate size, and that mean."""
    sizes: dict[int, list[float]] = {}
    for rows in gates.values():
        for layer, row in enumerate(rows):
            sizes.setdefault(layer, []).extend(map(abs, row or ()))
    # Layers without gates are left out.
    means = {layer: sum(values) / len(values) for layer, values in sizes.items() if values}
    layer = max(means, key=lambda i: means[i])
    return layer, means[layer]


def format_command(*words: object) -> str:
    """Return a `hyperattn` command line, quoted for a shell."""
    return shlex.join(["hyperattn", *map(str, words)])


def get_model_stem(args: argparse.Namespace) -> str:
    """Return the last part of the model's path or Hub id."""
    return os.path.basename(os.path.abspath(args.model))
