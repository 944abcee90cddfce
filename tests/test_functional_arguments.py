"""Arguments of the functions: what is no bool, no number or out of range is refused, in one line that names all."""

import inspect
import re

import pytest
import torch

from hf_hyperattn import functional
from hf_hyperattn.mechanisms.sparse import Window

B, H, N, D = 1, 2, 4, 8


def t(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


QK = {"query": t(B, H, N, D), "key": t(B, H, N, D)}
QKV = QK | {"value": t(B, H, N, D)}
CALLS = {
    "cone_attention": QKV | {"variant": "penumbral"},
    "cone_scores": QK | {"variant": "penumbral"},
    "hyperbolic_attention": QKV,
    "hyperbolic_scores": QK,
    "edge_attention": {name: x[0].mT.contiguous() for name, x in QKV.items()}
    | {"edges": torch.tensor([[0, 1], [1, 1]])},
    "hype_attention": QKV | {"mu": 0.1, "tau": 1.0},
    "hype_bias": {
        "query_positions": torch.arange(4),
        "key_positions": torch.arange(4),
        "mu": 0.1,
        "tau": 1.0,
    }
    | {"form": "sinh"},
    "hierarchical_attention": QKV | {"hierarchy": (2, 4), "tying": "key"},
    "trilinear_attention": QKV | {"key2": QK["key"], "value2": QKV["value"]},
    "bidaf_scores": QK | {"w1": t(D), "w2": t(D), "w3": t(D)},
    "mkl_attention": QKV | {"beta": t(H)},
    "sparse_attention": QKV | {"is_causal": True, "rules": Window(2)},
    "talking_heads_attention": QKV | {"before": None, "after": None},
}
FLAGS = ("is_causal", "enable_gqa", "squared", "clamp_heights", "keep_diagonal", "combine")
POSITIVE = ("gamma", "radius", "curvature", "temperature", "mu")
NAN, INF = float("nan"), float("inf")
BAD = {name: ("no", 1, 0.0, None) for name in FLAGS}
BAD |= {
    name: ("1", True, NAN, INF, 0.0, -1.0, torch.tensor([1.0, NAN]), torch.ones(3))
    for name in POSITIVE
}
BAD |= {
    "tau": ("1", True, -1.0, NAN, INF, torch.tensor([1.0, INF])),
    "scale": ("1", True, NAN, INF, -INF),
}
BAD |= {"dropout_p": ("no", True, NAN, -0.1, 1.0, None), "attn_mask": ([[True]], "causal", 1)}
BAD |= {
    name: ("nonsense", 1, ["sinh"])
    for name in ("variant", "mapping", "distance", "aggregation", "form")
}
NOT_DENSE, COMPLEX = t(B, H, N, D).to_sparse(), t(B, H, N, D) + 0j
BAD |= {"query": ([1.0], None, NOT_DENSE, COMPLEX), "key": ([1.0], NOT_DENSE), "value2": (COMPLEX,)}
BAD |= {"value": (None, [1.0], NOT_DENSE, t(B, H, N, 0)), "key2": ([1.0], NOT_DENSE, COMPLEX)}
BAD |= {"tying": ("nonsense", 1), "backend": ("nonsense",)}
BAD |= {"near": (-1, 1.5, "no", True), "block_bias": (NAN, "no", torch.tensor([NAN, 0.0]))}
BAD |= {
    "edges": (
        [[0], [1]],
        torch.tensor([0, 1]),
        torch.tensor([[0], [99]]),
        torch.tensor([[0.0], [1.0]]),
    )
}
BAD |= {
    "windows": ((0, 1), "no"),
    "beta": ([1.0], 1.0),
    "before": ([1.0],),
    "w1": ([1.0], t(D) + 0j),
}
BAD |= {"rules": (None, 3, (), "window"), "first": (-1, 1.5, "no", True, 1)}
CASES = [
    pytest.param(name, argument, value, id=f"{name}-{argument}-{i}")
    for name in CALLS
    for argument in inspect.signature(getattr(functional, name)).parameters
    for i, value in enumerate(BAD.get(argument, ()))
    if not (
        name == "hype_bias" and isinstance(value, torch.Tensor) and len(value) == 3
    )  # as many heads as it has
]


@pytest.mark.parametrize("name, argument, value", CASES)
def test_what_an_argument_cannot_be_is_refused_in_one_line(name, argument, value):
    with pytest.raises(ValueError) as refused:
        getattr(functional, name)(**CALLS[name] | {argument: value})
    message = str(refused.value)
    assert "\n" not in message and len(message) < 300
    assert re.search(rf"\b{argument}\b", message) and "allowed" in message, message


@pytest.mark.parametrize("name", CALLS)
def test_every_function_and_argument_is_here(name):
    """And what is asked of in good order is served."""
    assert set(CALLS) == set(functional.__all__) - {
        "scored_attention"
    }  # tests/mechanisms/test_scores.py
    getattr(functional, name)(**CALLS[name])
    free = {"w2", "w3", "key_beta", "after", "hierarchy", "sinks", "refine_top_k"}
    free |= {"query_positions", "key_positions", "scores", "options"}
    assert set(inspect.signature(getattr(functional, name)).parameters) <= set(BAD) | free


@pytest.mark.parametrize("name", ["cone_attention", "hyperbolic_attention", "hype_attention"])
def test_values_of_tensors_elsewhere_are_not_waited_for(name):
    """On "meta", as on a GPU, a parameter's values are not looked at."""
    given = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in CALLS[name].items()}
    other = {
        n: torch.tensor([-1.0, 1.0], device="meta") for n in POSITIVE[: 2 if "cone" in name else 0]
    }
    assert getattr(functional, name)(**given | other, backend="reference").shape == (B, H, N, D)
