"""Ways, forms and parameters that the tests of `hype_attention` share."""

import pytest
import torch

from tests.oracles.cases import BACKENDS, DTYPES

WAYS = [*BACKENDS, "sdpa", "auto"]
every_way = pytest.mark.parametrize("backend", WAYS)
every_form = pytest.mark.parametrize("form", ["sinh", "cosh"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
LONG = 20  # queries; up to 16 sdpa takes the bias as a mask, from 17 on as columns
NAMES = ("query", "key", "value", "mu", "tau")


def per_head(heads, dtype=torch.float64):
    """(mu, tau), one value per head, all different."""
    mu = torch.linspace(0.02, 0.11, heads, dtype=torch.float64)
    return mu.to(dtype), torch.linspace(9.0, 2.0, heads, dtype=torch.float64).to(dtype)
