"""Read and check the values of options."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from .mechanisms import patch_names
from .parser import suggest_nearest

#: Largest value of an option that counts something.
MAX_COUNT = 10**9
#: Seconds per unit of --budget.
UNITS = {"s": 1, "min": 60, "h": 3600}
#: Smallest value of every option that counts something, by command.
MIN_COUNTS = {
    "bench": {"length": 2, "generate": 2, "repeats": 1},
    "compare": {"steps": 2, "seeds": 3, "length": 16, "held_out": 1, "rank": 1},
    "demo": {"length": 2, "tokens": 32, "generate": 1},
    "heal": {"lora": 1, "steps": 1, "length": 32, "save_every": 1},
    "eval": {"length": 2, "tokens": 32},
    "hyperbolicity": {"tokens": 32, "points": 8, "size": 4, "draws": 1, "seed": 0},
    "inject": {"length": 64, "rows": 16, "rank": 1},
    "look": {"length": 32, "query": 0},
}
_SHARE = ("above 0 and below 1", lambda value: 0 < value < 1)
_UP_TO_1 = ("above 0, up to 1", lambda value: 0 < value <= 1)
#: Allowed values of other numeric options, in words and as a test, by command.
RANGES: dict[str, dict[str, tuple[str, Callable[[float], bool]]]] = {
    "compare": {
        "rate": _SHARE,
        "added_rate": _SHARE,
        "seeds": ("3 to 100", lambda value: value <= 100),
    },
    "heal": {
        "lr": _UP_TO_1,
        "patch_lr": _UP_TO_1,
        "seed": ("0 to 2**31 - 1", lambda value: 0 <= value < 2**31),
    },
    "inject": {
        "budget": (f"{_SHARE[0]}, such as 0.02", _SHARE[1]),
        "pairs": _UP_TO_1,
        "retrieval_budget": ("above 0, up to 1000", lambda value: 0 < value <= 1000),
        "seed": ("0 to 2**63 - 1", lambda value: 0 <= value < 2**63),
    },
}


def parse_recipe(text: str) -> str:
    """Check the value of --mechanism: known names joined by "+"."""
    for name in text.split("+"):
        if name not in patch_names():
            allowed = ", ".join(patch_names())
            hint = suggest_nearest(name, patch_names())
            raise argparse.ArgumentTypeError(
                f"no mechanism {name!r}; allowed: {allowed}; several with +{hint}"
            )
    return text


def parse_recipes(text: str) -> list[str]:
    """Parse the value of --mechanisms: recipes and "none", separated by commas."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name != "none":
            parse_recipe(name)
    if len(set(names)) < len(names) or set(names) == {"none"}:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no comparison; allowed: names once each, such as cone,hype,none"
        )
    return names


def parse_duration(text: str) -> float:
    """Parse a time such as 90s, 20min or 1.5h into seconds."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)(s|min|h)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; allowed: such as 90s, 20min or 1.5h"
        )
    return float(match[1]) * UNITS[match[2]]


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE of --set; a value that is not JSON is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no setting; allowed: NAME=VALUE, such as rank=96"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def check_counts(args: argparse.Namespace) -> None:
    """Raise ValueError if a numeric option is out of its range."""
    for option, least in MIN_COUNTS.get(args.command, {}).items():
        value = getattr(args, option)
        if value is not None and not least <= value <= MAX_COUNT:
            bound = f"{least} or more" if value < least else f"up to {MAX_COUNT:,}"
            raise ValueError(
                f"--{option.replace('_', '-')} {value} is not allowed; allowed: {bound}"
            )
    for option, (allowed, fits) in RANGES.get(args.command, {}).items():
        value = getattr(args, option)
        if value is not None and not fits(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ValueError(
                f"--{option.replace('_', '-')} {shown} is not allowed; allowed: {allowed}"
            )
