"""Tiny models with HyPE, in which a wrong distance shows."""

import pytest

from hf_hyperattn import HypeConfig, patch_model
from tests.integration.attention.test_families import CAUSAL, model_of
from tests.zoo.inputs import words

# The bias decides: at distance 9 it is 10 logits in the first head.
STEEP = dict(mu=0.15, tau=(6.0, 3.0, 1.5, 0.7))
every_causal = pytest.mark.parametrize("family", CAUSAL)


def steep(family, **changes):
    """A tiny model in which a wrong distance changes every logit."""
    return patch_model(model_of(family, "eager", **changes), HypeConfig(**STEEP), mode="replace")


def ids_of(model, length=9, rows=2):
    """Tokens [rows, length], the same in every call."""
    return words(model.config, length=length)[:rows]
