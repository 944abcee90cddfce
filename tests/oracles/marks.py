"""Decorators of the tests that run over everything there is."""

import pytest

from tests.oracles.cases import BACKENDS, CORE, PAIRINGS

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_pairing = pytest.mark.parametrize("pairing", PAIRINGS)
core_pairing = pytest.mark.parametrize("pairing", CORE)
both_dtypes = pytest.mark.parametrize("dtype", ["float64", "float32"])
causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
