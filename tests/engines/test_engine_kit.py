"""The contract of engines, as third parties check it."""

import pytest
import torch

from hf_hyperattn.engines import ENGINES, reference, register_engine
from hf_hyperattn.testing import ContractError, check_engine, engine_checks


@pytest.mark.parametrize(
    "check",
    [c for name in ("auto", "blockwise", "cpu", "reference") for c in engine_checks(name)],
    ids=str,
)
def test_contract(check):
    check()


def test_sdpa_keeps_it_for_the_dot_product_alone():
    refuses = {"sdpa-(umbral|penumbral|geodesic|midpoint).*": "sdpa"}
    assert check_engine("sdpa", refuses=refuses) == {"held": 30, "refused": 75}  # HyPE is a bias


def test_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="backend='warp' is unknown; allowed: auto, reference"):
        check_engine("warp")


@pytest.fixture
def broken(request):
    register_engine("broken", request.param)
    yield
    del ENGINES["broken"]


def no_mask(score, value, options):
    return reference.attend(score, value, type(options)(is_causal=options.is_causal))


def no_gradient(score, value, options):
    out, _ = reference.attend(score, value.detach(), options)
    return out + 0 * value.sum(), None


def refuses(score, value, options):
    raise ValueError("broken computes nothing")


@pytest.mark.parametrize(
    "broken, error, said",
    [
        (no_mask, ContractError, "broken-dot product-masked-float64: the output is"),
        (no_gradient, ContractError, "the gradient of value is"),
        (
            refuses,
            ContractError,
            "it is refused, which `refuses` does not expect: broken computes nothing",
        ),
    ],
    indirect=["broken"],
)
def test_what_is_broken_is_found(broken, error, said):
    with pytest.raises(error, match=said) as caught:
        check_engine("broken", [torch.float64])
    assert "\n" not in str(caught.value)
