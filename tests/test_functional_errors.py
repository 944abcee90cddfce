"""Bad input of `cone_attention` is refused in one line that names the argument and the value it had."""

import math

import pytest
import torch

from hf_hyperattn.functional import cone_attention, cone_scores
from tests.oracles.cases import BACKENDS, qkv

GOOD = {"attn_mask": None, "gamma": 1.0, "radius": 1.0}
Q, K, V = qkv(batch=2, heads=4, lq=5, lk=6, d=3, dtype=torch.float32)
NARROW_K, NARROW_V = K[:, :3], V[:, :3]
NAN, INF = float("nan"), math.inf


def per_head_with(value, heads=4):
    return torch.tensor([1.0] * (heads - 1) + [value])


# what is changed -> fragments the message must hold: the argument, and the value or shape that was refused
BAD = {
    "query of rank 3": ({"query": Q[0]}, ["query", "(4, 5, 3)"]),
    "key of rank 3": ({"key": K[0]}, ["key", "(4, 6, 3)"]),
    "value of rank 5": ({"value": V[None]}, ["value", "(1, 2, 4, 6, 3)"]),
    "key of another batch": ({"key": K[:1], "value": V[:1]}, ["batch", "1", "2"]),
    "value of another batch": ({"value": V[:1]}, ["value", "1", "2"]),
    "key of another width": ({"key": K[..., :2]}, ["key", "2", "3"]),
    "value of another length": ({"value": V[:, :, :4]}, ["value", "4", "6"]),
    "value of other heads than key": ({"value": V[:, :2]}, ["value", "2", "4"]),
    "fewer key heads without enable_gqa": (
        {"key": K[:, :2], "value": V[:, :2]},
        ["enable_gqa", "2", "4"],
    ),
    "heads that do not divide": (
        {"key": NARROW_K, "value": NARROW_V, "enable_gqa": True},
        ["heads", "3", "4"],
    ),
    "head dimension 1": ({"query": Q[..., :1], "key": K[..., :1]}, ["dim", "1"]),
    "integer query": ({"query": Q.long()}, ["query", "int64"]),
    "integer key": ({"key": K.long()}, ["key", "int64"]),
    "integer value": ({"value": V.long()}, ["value", "int64"]),
    "complex query": ({"query": Q + 0j}, ["query", "complex64"]),
    "gamma zero": ({"gamma": 0.0}, ["gamma", "0"]),
    "gamma negative": ({"gamma": -2.5}, ["gamma", "-2.5"]),
    "gamma NaN": ({"gamma": NAN}, ["gamma", "nan"]),
    "gamma infinite": ({"gamma": INF}, ["gamma", "inf"]),
    "gamma negative in one head": ({"gamma": per_head_with(-0.75)}, ["gamma", "-0.75"]),
    "gamma NaN in one head": ({"gamma": per_head_with(NAN)}, ["gamma", "nan"]),
    "gamma for three heads": ({"gamma": torch.ones(3)}, ["gamma", "3", "4"]),
    "gamma of rank 2": ({"gamma": torch.ones(4, 1)}, ["gamma", "(4, 1)"]),
    "gamma a word": ({"gamma": "large"}, ["gamma", "large"]),
    "radius zero": ({"radius": 0.0}, ["radius", "0"]),
    "radius negative": ({"radius": -1.25}, ["radius", "-1.25"]),
    "radius NaN": ({"radius": NAN}, ["radius", "nan"]),
    "radius zero in one head": ({"radius": per_head_with(0.0)}, ["radius", "0"]),
    "radius NaN in one head": ({"radius": per_head_with(NAN)}, ["radius", "nan"]),
    "radius for five heads": ({"radius": torch.ones(5)}, ["radius", "5", "4"]),
    "unknown variant": ({"variant": "antumbral"}, ["variant", "antumbral", "umbral", "penumbral"]),
    "unknown mapping": ({"mapping": "rho"}, ["mapping", "rho", "xi", "psi", "expmap"]),
    "unknown backend": ({"backend": "warp"}, ["backend", "warp", "reference", "blockwise", "auto"]),
    "penumbral with xi": (
        {"variant": "penumbral", "mapping": "xi"},
        ["mapping", "xi", "clamp_heights"],
    ),
    "penumbral with expmap": (
        {"variant": "penumbral", "mapping": "expmap"},
        ["mapping", "expmap", "clamp_heights"],
    ),
    "mask of another length": (
        {"attn_mask": torch.ones(5, 7, dtype=torch.bool)},
        ["attn_mask", "(5, 7)"],
    ),
    "mask of other heads": (
        {"attn_mask": torch.ones(2, 3, 5, 6, dtype=torch.bool)},
        ["attn_mask", "(2, 3, 5, 6)"],
    ),
    "mask of rank 5": (
        {"attn_mask": torch.ones(1, 1, 1, 5, 6, dtype=torch.bool)},
        ["attn_mask", "(1, 1, 1, 5, 6)"],
    ),
    "integer mask": ({"attn_mask": torch.ones(5, 6, dtype=torch.long)}, ["attn_mask", "int64"]),
    "dropout negative": ({"dropout_p": -0.1}, ["dropout_p", "-0.1"]),
    "dropout of one": ({"dropout_p": 1.0}, ["dropout_p", "1.0"]),
    "dropout NaN": ({"dropout_p": NAN}, ["dropout_p", "nan"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name):
    change, fragments = BAD[name]
    with pytest.raises(ValueError) as caught:
        cone_attention(**{"query": Q, "key": K, "value": V, **change})
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400, message
    missing = [f for f in fragments if f.lower() not in message.lower()]
    assert not missing, f"the message lacks {missing}: {message}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["gamma negative in one head", "mask of another length", "head dimension 1"]
)
def test_every_engine_refuses_alike(backend, name):
    with pytest.raises(ValueError):
        cone_attention(**{"query": Q, "key": K, "value": V, **BAD[name][0], "backend": backend})


@pytest.mark.parametrize(
    "name", [n for n in BAD if not {"value", "attn_mask", "dropout_p", "backend"} & set(BAD[n][0])]
)
def test_scores_refuse_the_same_input(name):
    setting = {
        "variant": "umbral",
        "mapping": None,
        "gamma": 1.0,
        "radius": 1.0,
        "squared": True,
        "clamp_heights": False,
    }
    with pytest.raises(ValueError) as caught:
        cone_scores(**{"query": Q, "key": K, **setting, **BAD[name][0]})
    assert "\n" not in str(caught.value)


def test_penumbral_is_refused_from_the_arguments_alone():
    """The pairing is refused also for inputs whose heights happen to lie below the radius."""
    low = torch.full_like(Q, -50.0)
    for mapping in ("xi", "expmap"):
        with pytest.raises(ValueError, match="clamp_heights"):
            cone_attention(low, low, low, variant="penumbral", mapping=mapping, radius=1e6)
        cone_attention(low, low, low, variant="penumbral", mapping=mapping, clamp_heights=True)


@pytest.mark.parametrize("function", [cone_attention, cone_scores])
@pytest.mark.parametrize("setting", [{"squared": False}, {"clamp_heights": True}])
def test_umbral_refuses_what_only_penumbral_reads(function, setting):
    tensors = (Q, K, V) if function is cone_attention else (Q, K)
    with pytest.raises(
        ValueError, match=rf"^{next(iter(setting))}=.* has no meaning for variant='umbral'"
    ):
        function(*tensors, variant="umbral", **setting)
    function(*tensors, variant="penumbral", **setting)


def test_unknown_arguments_are_not_swallowed():
    with pytest.raises(TypeError, match="scale"):
        cone_attention(Q, K, V, scale=0.5)


@pytest.mark.parametrize(
    "kind", [int, float, lambda v: torch.full((4,), float(v))], ids=["int", "float", "tensor"]
)
def test_parameters_may_be_numbers_or_one_value_per_head(kind):
    out = cone_attention(Q, K, V, gamma=kind(2), radius=kind(1))
    assert torch.allclose(out, cone_attention(Q, K, V, gamma=2.0, radius=1.0))
