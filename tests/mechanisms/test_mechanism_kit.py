"""The kit finds what is broken: mechanisms as somebody else would write them, each with one mistake."""

import re
from functools import partial

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.integration.attention.stock import OURS
from hf_hyperattn.registry import MECHANISMS, Mechanism, register
from hf_hyperattn.testing import CONTRACTS, ContractError, check_mechanism, mechanism_checks
from hf_hyperattn.testing.mechanisms import compute_gradients
from tests.integration.patching.toy_rooms import ToySlopeConfig, ToySlopeLayer, register_toys


@pytest.fixture(autouse=True)
def registry():
    known = set(MECHANISMS)
    yield
    for name in set(MECHANISMS) - known:
        del MECHANISMS[name]
        OURS.discard(name)


def test_what_a_stranger_registers_keeps_every_contract():
    register_toys()
    for name, refuses in (
        ("toy_cosine", {"heads-.*": "toy_cosine changes all heads"}),
        (
            "toy_slope",
            {
                "(learning|gradients|checkpointing|adapter)-.*-replace-.*": "nothing is added that learns"
            },
        ),
    ):
        slow = ["compiled"] + ["composition"] * (
            name == "toy_cosine"
        )  # beside hsa it is refused when it runs
        quick = [c for c in CONTRACTS if c not in slow]
        done = check_mechanism(name, contracts=quick, families=["llama", "bert"], refuses=refuses)
        assert done["held"] >= 30, done


class RefusesGpt2(ToySlopeLayer):
    def __init__(self, config, host, mode="replace", heads=None):
        if "transformer.h" in host.name:
            raise ValueError("toy_slope cannot change gpt2")
        super().__init__(config, host, mode, heads)


@pytest.mark.parametrize(
    "families, refuses, error, said",
    [
        (
            ["gpt2"],
            None,
            ContractError,
            "it is refused, which `refuses` does not expect: toy_slope cannot change gpt2",
        ),
        (
            ["gpt2"],
            {".*-gpt2": "rotary"},
            ContractError,
            "the refusal does not say 'rotary': toy_slope cannot",
        ),
        (
            ["bert"],
            {".*-bert": "cannot change"},
            ContractError,
            "it is not refused, which `refuses` expects",
        ),
        (
            ["bert"],
            {".*-gpt2": "cannot change"},
            ValueError,
            "refuses has '.*-gpt2', and no check has such a name",
        ),
        (
            ["gpt2"],
            {".*-gpt2": "cannot change"},
            ValueError,
            "toy_slope is refused in all 2 checks",
        ),
    ],
)
def test_a_refusal_is_expected_or_an_error(families, refuses, error, said):
    register(
        Mechanism("toy_slope", "bias", "none", ToySlopeConfig, RefusesGpt2, cross_attention=False)
    )
    with pytest.raises(error, match=re.escape(said)) as caught:
        check_mechanism("toy_slope", contracts=["reload"], families=families, refuses=refuses)
    assert "\n" not in str(caught.value)
    done = check_mechanism(
        "toy_slope",
        contracts=["reload"],
        families=["gpt2", "bert"],
        refuses={".*-gpt2": "cannot change gpt2"},
    )
    assert done == {"held": 2, "refused": 2}


def test_the_limit_does_not_grow_with_the_numbers():
    (check,) = mechanism_checks("cone", contracts=["identity"], families=["bert"])
    check.require_equal(torch.full((3,), 1e3), torch.full((3,), 1e3), 1e-5, "nothing")
    for first, second in (
        (torch.full((3,), 1e3 + 1e-2), torch.full((3,), 1e3)),
        (torch.tensor([float("nan")]), torch.zeros(1)),
        (torch.zeros(3), torch.zeros(3, 1)),
    ):
        with pytest.raises(ContractError):
            check.require_equal(first, second, 1e-5, "something")


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_wrong_gradient_is_no_rounding(family):
    """Where logits are thousands, and rounding is a thousandth of a gradient, one that is 1 % off is found."""
    config = ha.HyperbolicConfig(distance="squared_lorentz", aggregation="mean")
    (check, _) = mechanism_checks("hyperbolic", config, contracts=["compiled"], families=[family])
    model = check.make_patched_model(num_hidden_layers=1)
    right = compute_gradients(model, family)
    check.require_equal_but_rounding(
        right, model, partial(compute_gradients, family=family), 1e-5, "nothing"
    )
    for name in right:
        wrong = right | {name: 1.01 * right[name]}
        with pytest.raises(
            ContractError,
            match=rf"a factor changes \S*{name} by .* from what float64 gives, allowed",
        ):
            check.require_equal_but_rounding(
                wrong, model, partial(compute_gradients, family=family), 1e-5, "a factor"
            )


class StartsElsewhere(ToySlopeLayer):
    def identical(self):
        return False

    def change(self, plan):
        with torch.no_grad():
            self.gate.fill_(1.0)
        return super().change(plan)


class ForgetsToLearn(ToySlopeLayer):
    def change(self, plan):
        gate, self.gate = self.gate, torch.nn.Parameter(self.gate.detach())
        try:
            return super().change(plan)
        finally:
            self.gate = gate


class ChangesOtherHeads(ToySlopeLayer):
    def head_mask(self, like):
        return None


class ReadsTheWholeLength(ToySlopeLayer):
    """Whose bias depends on how many keys there are, and so on a cache and on padding."""

    def change(self, plan):
        keys = plan.call.key.shape[2]
        return super().change(plan.change(value=plan.value * (1 + 0.1 * keys)))


BROKEN = {
    "identity": (StartsElsewhere, "patching changes the output by"),
    "learning": (ForgetsToLearn, "gate gets no gradient"),
    "heads": (ChangesOtherHeads, "changes other heads by"),
    "cached": (ReadsTheWholeLength, "changes the output by|writes other tokens"),
    "padding": (ReadsTheWholeLength, "padding changes the output by"),
}


@pytest.mark.parametrize("contract", BROKEN)
def test_what_is_broken_is_found(contract):
    layer, said = BROKEN[contract]
    register(Mechanism("toy_slope", "bias", "none", ToySlopeConfig, layer, cross_attention=False))
    with pytest.raises(ContractError, match=said) as caught:
        check_mechanism("toy_slope", contracts=[contract], families=["llama"])
    assert str(caught.value).startswith(f"{contract}-toy_slope") and "\n" not in str(caught.value)


def test_wrong_questions_are_answered_in_one_line():
    for call, said in (
        (lambda: check_mechanism("warp"), "mechanism 'warp' is unknown; allowed: "),
        (
            lambda: check_mechanism("cone", contracts=["speed"]),
            "contract 'speed' is unknown; allowed: identity, ",
        ),
        (
            lambda: mechanism_checks("cone", families=["elman"]),
            "family 'elman' is unknown; allowed: llama, ",
        ),
        (
            lambda: check_mechanism(
                "cone", contracts=["reload"], families=["vit"], refuses={"x": "y"}
            ),
            "refuses has 'x', and no check has such a name; allowed: such as reload-cone",
        ),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_it_is_part_of_the_public_face():
    assert ha.testing.check_mechanism is check_mechanism
