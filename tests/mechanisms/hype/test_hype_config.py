"""What `HypeConfig` and the layer refuse, and that the config is plain JSON."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn import HypeConfig, patch_model
from hf_hyperattn.engines import Options
from hf_hyperattn.integration.attention.hyper import Hyper
from hf_hyperattn.mechanisms.base import Host, HostCall
from tests.integration.models import State, llama

BAD = {
    "mu zero": ({"mu": 0.0}, ["HypeConfig.mu=0.0", "above 0"]),
    "mu negative in one head": ({"mu": (0.1, -0.1)}, ["HypeConfig.mu", "-0.1", "above 0"]),
    "tau negative": ({"tau": -1.0}, ["HypeConfig.tau=-1.0", "from 0"]),
    "tau infinite": ({"tau": float("inf")}, ["HypeConfig.tau=inf", "finite"]),
    "max_length zero": ({"max_length": 0}, ["HypeConfig.max_length=0", "above 0"]),
    "max_length negative": ({"max_length": -8}, ["HypeConfig.max_length=-8", "above 0"]),
    "max_length a fraction": ({"max_length": 8.5}, ["HypeConfig.max_length=8.5", "int"]),
    "unknown form": ({"form": "tanh"}, ["HypeConfig.form='tanh'", "'sinh', 'cosh'"]),
    "unknown slopes": ({"slopes": "steep"}, ["HypeConfig.slopes='steep'", "'alibi'"]),
    "slopes with a word": ({"slopes": (1.0, "x")}, ["HypeConfig.slopes", "'x'", "finite numbers"]),
    "no slopes": ({"slopes": ()}, ["HypeConfig.slopes=()", "at least one"]),
    "mu and max_length": ({"mu": 0.1, "max_length": 10}, ["HypeConfig.max_length=10", "mu"]),
    "tau and slopes": ({"tau": 1.0, "slopes": (1.0, 2.0)}, ["HypeConfig.slopes", "tau"]),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_configs_are_refused_in_one_line(what):
    changes, fragments = BAD[what]
    with pytest.raises(ValueError) as caught:
        HypeConfig(**changes)
    message = str(caught.value)
    assert "\n" not in message and all(f in message for f in fragments), message


@pytest.mark.parametrize("name", ["mu", "tau", "slopes"])
def test_numbers_for_another_count_of_heads_are_refused(name):
    state = State(model := llama())
    with pytest.raises(
        ValueError, match=f"HypeConfig.{name} has 3 numbers; allowed: one, or one for each of the 4"
    ):
        patch_model(model, HypeConfig(**{name: (1.0, 2.0, 3.0)}))
    assert state.differences(State(model)) == []


UNEQUAL = {"is_causal": False, "key": torch.zeros(1, 4, 11, 8), "value": torch.zeros(1, 4, 11, 8)}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"keywords": {"indices": torch.zeros(1, 9, 2)}},
            "in that.host, where an indexer chooses the keys",
        ),
        (UNEQUAL, "which of 11 keys are those of the 9 queries in that.host"),
    ],
    ids=["indexer", "two lengths"],
)
def test_calls_without_an_order_are_refused(changes, message):
    host = Host("that.host", heads=4, kv_heads=4, is_causal=True, is_cross=False, layer_index=0)
    hyper = Hyper(ha.HyperAttnConfig([HypeConfig(mu=0.1)], mode="replace"), host)
    x = torch.randn(1, 4, 9, 8)
    call = (
        dict(query=x, key=x, value=x, scale=1.0, is_causal=True, options=Options(), keywords={})
        | changes
    )
    with pytest.raises(ValueError, match=message):
        hyper(HostCall(**call))
