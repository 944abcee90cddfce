"""HyPE against ALiBi: by how much tau·sinh(mu·(j - i)), with tau = slope/mu, misses slope·(j - i), and where the cubic
term is all of it.

All bias errors are for slope 1; they are proportional to the slope.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from hf_hyperattn.functional import hype_bias

from .store import Experiment

SETTINGS = {
    "lengths": [10, 50, 100, 512, 2048, 8192],
    # mu as a multiple of 1/L, for the table.
    "mu_times_length": [0.1, 0.25, 0.5, 1.0, 2.0, 4.0],
    # mu by itself, for the plot: 10 to these powers.
    "log10_mu": [-6.0, 0.0, 49],
    # Attention by the bias alone, over L keys: what the error does to it, by slope·L.
    "attention": {
        "length": 8192,
        "mu_times_length": [0.25, 0.5, 1.0, 2.0],
        "log2_slope_length": [-4, 10, 57],
    },
    # ALiBi's slopes for eight heads, at mu = 1/L.
    "heads": 8,
}

#: Beyond this the bias itself means nothing any more: exp of it is 0 in float64.
LARGEST = 60.0


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    grid = np.logspace(*settings["log10_mu"][:2], settings["log10_mu"][2]).tolist()
    for length in settings["lengths"]:
        chosen = [x / length for x in settings["mu_times_length"]]
        yield f"bias, L = {length}", functools.partial(bias_errors, length, chosen, grid)
    yield "attention", functools.partial(attention_errors, **settings["attention"])
    yield "heads", functools.partial(head_errors, settings["lengths"], settings["heads"])


def hype(length: int, mu: float, slope: float = 1.0) -> np.ndarray:
    """HyPE's bias at the distances 0 .. L - 1 back, by the package, in float64: [L]."""
    keys = torch.arange(length, dtype=torch.float64)
    mu_, tau = (torch.tensor([x], dtype=torch.float64) for x in (mu, slope / mu))
    bias = hype_bias(keys[-1:], keys, mu=mu_, tau=tau, form="sinh")
    return bias.flatten().flip(0).numpy()


def error_of(length: int, mu: float) -> dict:
    """The largest and the mean |HyPE - ALiBi| over all causal pairs, and what the cubic term alone gives for both."""
    distance = np.arange(length)
    pairs = length - distance  # that are this far apart
    error = np.abs(hype(length, mu) + distance)
    cubic = mu**2 * distance**3 / 6
    return {
        "mu": mu,
        "max": error.max(),
        "mean": np.average(error, weights=pairs),
        "relative_max": error.max() / max(length - 1, 1),
        "cubic_max": cubic.max(),
        "cubic_mean": np.average(cubic, weights=pairs),
    }


def bias_errors(length: int, chosen: list[float], grid: list[float]) -> dict:
    """Errors at the values of mu for the table and at those for the plot."""
    return {
        "table": [error_of(length, mu) for mu in chosen],
        "curve": [error_of(length, mu) for mu in grid if mu * length < LARGEST],
        # The first value where the cubic term is 1 %, 10 % of the bias at the far end.
        "mu_of_relative_error": {
            str(share): root_of_relative_error(share) / max(length - 1, 1) for share in (0.01, 0.1)
        },
        "cosh": cosh_error(length),
    }


def root_of_relative_error(share: float) -> float:
    """The x with sinh(x)/x = 1 + share, by bisection; about sqrt(6·share)."""
    low, high = 1e-6, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.sinh(middle) / middle < 1 + share else (low, middle)
    return low


def cosh_error(length: int) -> dict:
    """The same for the bidirectional form with its default constants, against -slope·|i - j|."""
    at = torch.arange(length, dtype=torch.float64)
    mu, tau = (
        torch.tensor([1 / length], dtype=torch.float64),
        torch.tensor([2.0 * length], dtype=torch.float64),
    )
    bias = hype_bias(at[:1], at, mu=mu, tau=tau, form="cosh").flatten().numpy()
    distance = np.arange(length)
    error = np.abs(bias + distance)
    return {"max": error.max(), "mean": np.average(error, weights=length - distance)}


def attention_errors(length: int, mu_times_length: list[float], log2_slope_length: list) -> dict:
    """Total variation between attention by ALiBi's bias and by HyPE's, for a query that sees all L keys."""
    low, high, count = log2_slope_length
    slopes = (2.0 ** np.linspace(low, high, count) / length).tolist()
    return {
        "curves": {
            str(x): [[m * length, total_variation(length, m, x / length)] for m in slopes]
            for x in mu_times_length
        },
        "constant": steep_constant(),
    }


def head_errors(lengths: list[int], heads: int) -> dict:
    """That for each of ALiBi's slopes, at mu = 1/L."""
    slopes = [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]
    return {
        "slopes": slopes,
        "total_variation": {
            str(n): [total_variation(n, m, 1 / n) for m in slopes] for n in lengths
        },
    }


def total_variation(length: int, slope: float, mu: float) -> float:
    """Half of Σ |p - q| over softmaxes of the two biases."""
    p, q = softmax(-slope * np.arange(length)), softmax(hype(length, mu, slope))
    return 0.5 * np.abs(p - q).sum()


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the only axis."""
    e = np.exp(x - x.max())
    return e / e.sum()


def steep_constant() -> float:
    """c in total variation -> c · (mu/slope)² for steep slopes.

    There u = slope · distance is exponentially distributed, the cubic term is (mu/slope)²·u³/6, and to first order
    the total variation is half the mean of |cubic - its mean|; the mean of u³ is 6.
    """
    u = np.linspace(0, 60, 600_001)
    return float(np.trapezoid(np.abs(u**3 - 6) / 6 * np.exp(-u), u) / 2)


EXPERIMENT = Experiment("alibi", SETTINGS, runs)
