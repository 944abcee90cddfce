"""The table of refusals against the installed Transformers."""

import pytest

import model_patches
from model_patches import census

from .support import NEWEST

TYPES = census.model_types()


def test_every_model_type_is_accounted_for():
    unknown = [t for t in TYPES if census.state(t) == "unknown"]
    assert not unknown, f"neither routed, served, composite nor refused: {unknown}"


def test_nothing_is_both_served_and_refused():
    assert not set(model_patches.FAMILIES) & set(model_patches.REFUSED)


@pytest.mark.parametrize("model_type", sorted(model_patches.REFUSED))
def test_a_refused_type_exists_and_has_its_reason_in_one_line(model_type):
    reason = model_patches.REFUSED[model_type]
    assert (
        (model_type in TYPES or not NEWEST)
        and reason
        and "\n" not in reason
        and not reason.endswith(".")
    )
