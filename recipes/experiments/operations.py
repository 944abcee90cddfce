"""What operations in the ball cost: one call on one pair of points, a call on many, and attention over 64 tokens."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from hf_hyperattn import functional as ha
from hf_hyperattn.geometry import poincare

from .store import Experiment

SETTINGS = {
    "dim": 64,
    "points": 10000,
    "tokens": 64,
    "heads": 1,
    "rounds": 7,
    "least_seconds": 0.02,
}
#: Functions of points x and y, with curvature 1.
OPERATIONS = {
    "distance": lambda x, y: poincare.distance(x, y, 1.0),
    "Euclidean distance": lambda x, y: (x - y).norm(dim=-1),
    "exponential map at the origin": lambda x, y: poincare.expmap0(x, 1.0),
    "logarithmic map at the origin": lambda x, y: poincare.logmap0(x, 1.0),
    "Moebius addition": lambda x, y: poincare.mobius_add(x, y, 1.0),
}
#: Functions of query, key and value.
ATTENTION = {
    "hyperbolic attention": ha.hyperbolic_attention,
    "cone attention": ha.cone_attention,
    "SDPA": F.scaled_dot_product_attention,
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Every operation, then attention."""
    for name in OPERATIONS:
        yield name, functools.partial(time_points, settings, name)
    for name in ATTENTION:
        yield name, functools.partial(time_attention, settings, name)


@torch.no_grad()
def time_points(settings: dict, name: str) -> dict:
    """Microseconds of CPU time a call on one pair, and for each pair of many."""
    found = {}
    for what, count in (("one", 1), ("many", settings["points"])):
        draw = torch.Generator().manual_seed(0)
        x, y = (0.05 * torch.randn(count, settings["dim"], generator=draw) for _ in range(2))
        found[what] = round(
            microseconds(settings, functools.partial(OPERATIONS[name], x, y)) / count, 4
        )
    return found


@torch.no_grad()
def time_attention(settings: dict, name: str) -> dict:
    """Microseconds of CPU time a call."""
    draw, shape = (
        torch.Generator().manual_seed(0),
        (1, settings["heads"], settings["tokens"], settings["dim"]),
    )
    rows = [torch.randn(shape, generator=draw) for _ in range(3)]
    return {"one": round(microseconds(settings, functools.partial(ATTENTION[name], *rows)), 2)}


def microseconds(settings: dict, call: Callable) -> float:
    """The least over rounds of the CPU time of a call."""
    call()
    least, repeats = float("inf"), 1
    for _ in range(settings["rounds"]):
        while True:
            began = time.process_time()
            for _ in range(repeats):
                call()
            took = time.process_time() - began
            if took >= settings["least_seconds"]:
                break
            repeats *= 2
        least = min(least, took / repeats)
    return 1e6 * least


EXPERIMENT = Experiment("operations", SETTINGS, runs, hours=0.01)
