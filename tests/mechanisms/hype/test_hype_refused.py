"""What `hype_attention` and `hype_bias` refuse, and in which words."""

import math

import pytest
import torch

from hf_hyperattn.functional import hype_attention, hype_bias
from tests.oracles.cases import qkv

Q, K, V = qkv(batch=2, heads=4, lq=5, lk=6, d=3, dtype=torch.float32)
BAD = {
    "mu zero": ({"mu": 0.0}, ["mu", "0.0", "above 0"]),
    "mu negative": ({"mu": -0.5}, ["mu", "-0.5", "above 0"]),
    "mu NaN": ({"mu": math.nan}, ["mu", "nan"]),
    "mu for three heads": ({"mu": torch.ones(3)}, ["mu", "(3,)", "(4,)"]),
    "mu negative in one head": ({"mu": torch.tensor([1.0, 1, 1, -1])}, ["mu", "-1.0", "above 0"]),
    "tau infinite": ({"tau": math.inf}, ["tau", "inf", "finite"]),
    "tau NaN in one head": ({"tau": torch.tensor([0.0, 1, math.nan, 1])}, ["tau", "nan", "finite"]),
    "tau for two heads": ({"tau": torch.ones(2)}, ["tau", "(2,)", "(4,)"]),
    "tau a word": ({"tau": "steep"}, ["tau", "steep"]),
    "unknown form": ({"form": "tanh"}, ["form", "tanh", "sinh", "cosh"]),
    "unknown backend": ({"backend": "warp"}, ["backend", "warp", "sdpa"]),
    "too few positions": ({"key_positions": torch.arange(5)}, ["key_positions", "(5,)", "(6,)"]),
    "positions of another batch": (
        {"query_positions": torch.zeros(3, 5)},
        ["query_positions", "(3, 5)", "(2, 5)"],
    ),
    "positions true or false": (
        {"query_positions": torch.ones(5, dtype=torch.bool)},
        ["query_positions", "bool"],
    ),
    "positions not a tensor": ({"query_positions": [0, 1, 2, 3, 4]}, ["query_positions", "list"]),
    "positions NaN": (
        {"query_positions": torch.full((5,), math.nan)},
        ["query_positions", "finite"],
    ),
    "positions that learn": (
        {"query_positions": torch.zeros(5, requires_grad=True)},
        ["query_positions", "gradient", "detach"],
    ),
    "dropout of one": ({"dropout_p": 1.0}, ["dropout_p", "1.0"]),
    "grouped heads unasked": ({"key": K[:, :2], "value": V[:, :2]}, ["enable_gqa"]),
    "too steep for columns": (
        {"mu": 5.0, "tau": 1e5, "backend": "sdpa"},
        ["sdpa", "columns", "auto"],
    ),
    "columns and a mask that learns": (
        {"attn_mask": torch.zeros(5, 6, requires_grad=True), "backend": "sdpa"},
        ["sdpa", "mask", "auto"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused_in_one_line(what):
    changes, fragments = BAD[what]
    good = {"query": Q, "key": K, "value": V, "mu": 0.1, "tau": 1.0}
    with pytest.raises(ValueError) as caught:
        hype_attention(**(good | changes))
    message = str(caught.value)
    assert "\n" not in message and all(f in message for f in fragments), message


def test_the_bias_refuses_what_attention_refuses():
    at = torch.arange(4)
    for changes in (
        {"mu": 0.0},
        {"tau": math.nan},
        {"form": "tanh"},
        {"mu": torch.ones(2), "tau": torch.ones(3)},
    ):
        with pytest.raises(ValueError):
            hype_bias(at, at, **({"mu": 0.1, "tau": 1.0, "form": "sinh"} | changes))
    with pytest.raises(ValueError, match="key_positions"):
        hype_bias(at, at[None, None], mu=0.1, tau=1.0, form="sinh")
    with pytest.raises(ValueError, match="query_positions"):
        hype_bias(at.expand(2, 4), at.expand(3, 4), mu=0.1, tau=1.0, form="sinh")


@pytest.mark.parametrize(
    "value", [1e39, -1e39, torch.tensor([1.0, 1e39], dtype=torch.float64)], ids=str
)
def test_a_tau_that_float32_does_not_hold_is_refused(value):
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(
        ValueError, match=r"^tau=.* is not allowed; allowed: finite numbers from 0 to 3e\+38"
    ):
        hype_attention(q, q, q, mu=1.0, tau=value)
