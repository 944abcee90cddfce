"""What `hyperbolic_attention` refuses, and in which words."""

import math

import pytest
import torch
import torch.nn.functional as F

from hf_hyperattn import HyperbolicConfig
from hf_hyperattn.functional import hyperbolic_attention, hyperbolic_scores
from tests.oracles.cases import assert_close, qkv

Q, K, V = qkv(batch=2, heads=4, lq=5, lk=6, d=3, dtype=torch.float32)
BAD = {
    "curvature zero": ({"curvature": 0.0}, ["curvature", "0.0", "above 0"]),
    "curvature negative": ({"curvature": -1.5}, ["curvature", "-1.5", "above 0"]),
    "curvature NaN": ({"curvature": math.nan}, ["curvature", "nan"]),
    "curvature negative in one head": (
        {"curvature": torch.tensor([1, 1, 1, -0.5])},
        ["curvature", "-0.5"],
    ),
    "curvature for three heads": ({"curvature": torch.ones(3)}, ["curvature", "3", "4"]),
    "temperature zero": ({"temperature": 0}, ["temperature", "0", "above 0"]),
    "temperature negative": ({"temperature": -2.0}, ["temperature", "-2.0"]),
    "temperature infinite": ({"temperature": math.inf}, ["temperature", "inf"]),
    "temperature for five heads": ({"temperature": torch.ones(5)}, ["temperature", "5", "4"]),
    "temperature a word": ({"temperature": "hot"}, ["temperature", "hot"]),
    "scale zero": ({"scale": 0.0}, ["scale", "0.0", "above 0"]),
    "scale negative": ({"scale": -0.5}, ["scale", "-0.5"]),
    "scale NaN": ({"scale": math.nan}, ["scale", "nan"]),
    "unknown distance": (
        {"distance": "chord"},
        ["distance", "chord", "geodesic", "squared_lorentz"],
    ),
    "unknown aggregation": ({"aggregation": "klein"}, ["aggregation", "klein", "einstein", "mean"]),
    "unknown backend": ({"backend": "warp"}, ["backend", "warp", "reference", "auto"]),
    "dropout of one": ({"dropout_p": 1.0}, ["dropout_p", "1.0"]),
    "query of rank 3": ({"query": Q[0]}, ["query", "(4, 5, 3)"]),
    "fewer key heads": ({"key": K[:, :2], "value": V[:, :2]}, ["enable_gqa", "2", "4"]),
    "mask too wide": ({"attn_mask": torch.ones(5, 7, dtype=torch.bool)}, ["attn_mask", "(5, 7)"]),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_by_name_value_and_range(what):
    changes, fragments = BAD[what]
    with pytest.raises(ValueError) as caught:
        hyperbolic_attention(**{"query": Q, "key": K, "value": V, **changes})
    message = str(caught.value)
    assert "\n" not in message and all(f in message for f in fragments), message
    if not changes.keys() & {"value", "aggregation", "backend", "dropout_p", "attn_mask"}:
        with pytest.raises(ValueError):
            hyperbolic_scores(**{"query": Q, "key": K, **changes})


def test_argument_order_is_that_of_torch():
    q, k, v = qkv(dtype=torch.float32)
    mask = torch.ones(5, 5, dtype=torch.bool)
    F.scaled_dot_product_attention(q, k, v, mask, 0.0, False)
    positional = hyperbolic_attention(q, k, v, mask, 0.0, False, 0.5)
    assert_close(
        positional, hyperbolic_attention(q, k, v, attn_mask=mask, scale=0.5), 0.0, "output"
    )


@pytest.mark.parametrize(
    "value", [1e-50, 1e39, True, torch.tensor([1.0, 1e-50], dtype=torch.float64)], ids=str
)
@pytest.mark.parametrize("name", ["curvature", "temperature"])
def test_parameters_that_float32_does_not_hold_are_refused(name, value):
    """They would be 0 or infinite there, and the output NaN."""
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(
        ValueError, match=rf"^{name}=.* allowed: finite numbers above 0 .*1\.2e-38"
    ) as caught:
        hyperbolic_attention(q, q, q, **{name: value})
    assert "\n" not in str(caught.value)
    if not isinstance(value, torch.Tensor):
        with pytest.raises(ValueError, match=rf"^HyperbolicConfig\.{name}=.*; allowed: "):
            HyperbolicConfig(**{name: value})
