"""Decorators of the tests that run over everything there is, and of those that some versions cannot run."""

import peft
import pytest
import transformers
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.oracles.cases import BACKENDS, CORE, PAIRINGS

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_pairing = pytest.mark.parametrize("pairing", PAIRINGS)
core_pairing = pytest.mark.parametrize("pairing", CORE)
both_dtypes = pytest.mark.parametrize("dtype", ["float64", "float32"])


def first_always(names, cases, ids=None):
    """Parametrise with all cases, of which every run does the first, and `make test-more` the others."""
    ids = ids or [None] * len(cases)
    marks = [[]] + [[pytest.mark.slow]] * (len(cases) - 1)
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*(case if "," in names else (case,)), id=i, marks=m)
            for case, i, m in zip(cases, ids, marks, strict=True)
        ],
    )


# Transformers 5.24 asks for a PEFT that was not released before it. Tests of PEFT's own classes run all the same.
NO_NATIVE_ADAPTERS = (
    f"Transformers {transformers.__version__} refuses PEFT below {MIN_PEFT_VERSION} for its native "
    "adapters"
)


def has_native_adapters() -> bool:
    """Whether Transformers takes the installed PEFT for `model.add_adapter`."""
    return Version(peft.__version__) >= Version(MIN_PEFT_VERSION)


native_adapters = pytest.mark.skipif(not has_native_adapters(), reason=NO_NATIVE_ADAPTERS)
native_or_not = pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=native_adapters)]
)
causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
