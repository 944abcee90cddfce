"""The kit finds what is broken: mechanisms as somebody else would write them, each with one mistake."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.integration.stock import OURS
from hf_hyperattn.registry import MECHANISMS, Mechanism, register
from hf_hyperattn.testing import CONTRACTS, ContractError, check_mechanism, mechanism_checks
from tests.integration.toy_rooms import ToySlopeConfig, ToySlopeLayer, register_toys


@pytest.fixture(autouse=True)
def registry():
    known = set(MECHANISMS)
    yield
    for name in set(MECHANISMS) - known:
        del MECHANISMS[name]
        OURS.discard(name)


def test_what_a_stranger_registers_keeps_every_contract():
    register_toys()
    for name in ("toy_cosine", "toy_slope"):
        slow = ["compiled"] + ["composition"] * (name == "toy_cosine")  # beside hsa it is refused when it runs
        quick = [c for c in CONTRACTS if c not in slow]
        done = check_mechanism(name, contracts=quick, families=["llama", "bert"])
        assert done["held"] >= 30, done


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
    def chosen(self, like):
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
        (lambda: mechanism_checks("cone", families=["elman"]), "family 'elman' is unknown; allowed: llama, "),
        (
            lambda: check_mechanism("hype", contracts=["reload"], families=["vit"]),
            "hype is refused by every model",
        ),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_it_is_part_of_the_public_face():
    assert ha.testing.check_mechanism is check_mechanism
