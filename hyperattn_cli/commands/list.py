"""`hyperattn list`: show the mechanisms, from a JSON file of the package.

This module imports only `hyperattn_cli`, so that the list appears without waiting for torch.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hyperattn_cli import list_all_mechanisms, suggest_nearest
from hyperattn_cli.shared.wrap import wrap_text

#: Headings of the overview, by the `group` of each mechanism in mechanisms.json.
GROUPS = {
    "cheaper": "Cheaper attention for a pretrained model, no training  (hyperattn inject)",
    "score": "Hierarchy in the attention score, needs training  (ha.patch_model)",
    "heads": "Work across heads, needs training  (ha.patch_model)",
    "longer": "Longer inputs for an encoder, new architecture  (ha.convert)",
    "own": "From --import  (ha.patch_model)",
}
ADVICE = """Details and settings:  hyperattn list NAME
Try one on your text:  hyperattn compare MODEL --text FILE --mechanisms NAME,none"""
LABEL_WIDTH = 15


def run(args: argparse.Namespace) -> None:
    """Print the overview, or one mechanism.

    Raises:
        ValueError: There is no mechanism of this name.
    """
    known = list_all_mechanisms()
    if args.mechanism is None:
        overview = json.dumps(known, indent=2, ensure_ascii=False)
        print(overview if args.json else format_overview(known))
        return
    # A name of attention, such as "cone_penumbral", shows the mechanism that it selects.
    name = next((n for n, about in known.items() if args.mechanism in (n, *about["names"])), None)
    if name is None:
        raise ValueError(
            f"no mechanism {args.mechanism!r}; allowed: {', '.join(known)}{suggest_nearest(args.mechanism, known)}"
        )
    if args.json:
        print(json.dumps({name: known[name]}, indent=2, ensure_ascii=False))
    else:
        print(format_mechanism(name, known[name]))


def format_overview(known: dict[str, dict[str, Any]]) -> str:
    """Return one line per mechanism, under the headings of their groups."""
    # Two spaces on each side of the longest name.
    width = max(map(len, known)) + 4
    parts = []
    for group, heading in GROUPS.items():
        members = {name: about for name, about in known.items() if about["group"] == group}
        # Without --import, the group of imported mechanisms is empty.
        if not members:
            continue
        lines = [
            wrap_text(f"  {name}".ljust(width), about["summary"]) for name, about in members.items()
        ]
        parts.append("\n".join([heading, *lines]))
    return "\n\n".join([*parts, ADVICE])


def format_mechanism(name: str, about: dict[str, Any]) -> str:
    """Return the full description of one mechanism."""
    lines = [f"{name}: {about['title']} (changes: {about['stage']})", ""]
    for label, values in describe_mechanism(about).items():
        lines.append(wrap_text(f"  {label}".ljust(LABEL_WIDTH), values[0]))
        lines += [wrap_text(" " * LABEL_WIDTH, value) for value in values[1:]]
    return "\n".join(lines)


def describe_mechanism(about: dict[str, Any]) -> dict[str, list[str]]:
    """Return the lines that `hyperattn list NAME` shows, by label."""
    names = [f'"{name}"' for name in about["names"]]
    by_name = ["attn_implementation=" + " or ".join(names)] if names else []
    settings = ", ".join(
        f"{key}={format_default(value)}" for key, value in about["defaults"].items()
    )
    return {
        "Use it to": [about["use_to"]],
        "Apply with": [*(APPLY[way].format(**about) for way in about["how"]), *by_name],
        "At start": about["at_start"],
        "Time": [about["time"]],
        "Settings": [settings],
        "Paper": [about["paper"]],
    }


#: Code or command for each way of applying a mechanism.
APPLY = {
    "patch_model": "ha.patch_model(model, ha.{config}())",
    "convert": "ha.convert(model, ha.{config}(...))",
    "inject": "hyperattn inject MODEL",
}


def format_default(value: Any) -> str:
    """Return the default of a setting as Python code; a rule by its name."""
    if isinstance(value, dict):
        return f"{value['rule']} with its defaults"
    if isinstance(value, list):
        return "(" + ", ".join(map(format_default, value)) + ("," if len(value) == 1 else "") + ")"
    return json.dumps(value) if isinstance(value, str) else repr(value)
