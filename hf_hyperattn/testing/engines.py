"""Check that an engine agrees with `reference` in float64, outputs and gradients.

Here you learn which scores, calls and dtypes an engine must compute or refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from .. import functional
from ..engines import Options, attention, available_engines, dot_score
from .checks import Expectation, Refused, expect_refusals, run_checks

#: Largest absolute error of outputs, and largest relative error of gradients.
LIMITS = {
    torch.float64: (1e-9, 1e-7),
    torch.float32: (2e-4, 2e-3),
    torch.bfloat16: (3e-2, 6e-2),
}


@dataclass(frozen=True)
class EngineCheck(Expectation):
    """Compare one score in one kind of call with `reference`. Call it to check.

    Args:
        engine: A name from `available_engines()`.
        score: A name from `SCORES`.
        call: A name from `CALLS`.
        dtype: Dtype of queries, keys and values.
        refusal: Regular expression for the error with which the call must be refused. None: it must
            hold.
    """

    engine: str
    score: str
    call: str
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.engine}-{self.score}-{self.call}-{self.dtype}".replace("torch.", "")

    def check(self) -> None:
        """Compare outputs and gradients; raise ContractError or Refused."""
        exact = self._run_engine("reference", torch.float64)
        try:
            outputs = self._run_engine(self.engine, self.dtype)
        except ValueError as error:
            raise Refused(str(error)) from error
        output_limit, gradient_limit = LIMITS[self.dtype]
        names = ("output", "gradient of query", "gradient of key", "gradient of value")
        for name, one, other in zip(names, outputs, exact, strict=True):
            limit = output_limit
            # Gradients have no natural size, so their limit is relative to the largest one.
            if name != "output":
                limit = gradient_limit * other.abs().max().item()
            apart = (one.double() - other).abs().max().item()
            # `not ... <=` instead of `>`: it also catches NaN.
            if not apart <= limit:
                self.fail(f"the {name} is {apart:.1e} off, allowed: {limit:.1e}")

    def _run_engine(self, engine: str, dtype: torch.dtype) -> list[Tensor]:
        """Return the output and the gradients of query, key and value."""
        # Rounded to the check's dtype first: `reference` computes in float64 from the same numbers.
        leaves = [t.to(self.dtype).to(dtype).requires_grad_() for t in make_vectors()]
        options = {
            n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
            for n, t in CALLS[self.call].items()
        }
        output = SCORES[self.score](*leaves, **options, enable_gqa=True, backend=engine)
        pull = torch.randn(
            output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        return [output.detach(), *torch.autograd.grad((output.double() * pull).sum(), leaves)]


@cache
def make_vectors() -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [2, 4, 37, 8], and keys and values [2, 2, 45, 8], in float64."""
    g = torch.Generator().manual_seed(7)
    query, key, value = (
        torch.randn(2, h, n, 8, generator=g, dtype=torch.float64)
        for h, n in ((4, 37), (2, 45), (2, 45))
    )
    # Equal and nearly equal queries and keys: there distances have their largest relative errors.
    query[:, :, :8] = torch.randint(-2, 3, (2, 4, 8, 8), generator=g).double()
    key[:, :, :8] = query[:, ::2, :8]
    key[:, :, 8:16] = query[:, ::2, 8:16] + 1e-2 * torch.randn(
        2, 2, 8, 8, generator=g, dtype=torch.float64
    )
    query[..., -1][:, :, 3] = 1.0
    key[:, :, 20] = 0.0
    # All dtypes compute from the same numbers.
    return query.bfloat16().double(), key.bfloat16().double(), value.bfloat16().double()


_MASK = torch.rand(2, 1, 37, 45, generator=torch.Generator().manual_seed(8)) < 0.7
#: Kinds of calls, by name: arguments of `scaled_dot_product_attention`.
CALLS: dict[str, dict] = {
    "full": {},
    "causal": {"is_causal": True},
    "masked": {"attn_mask": _MASK},
    "masked and causal": {"attn_mask": _MASK, "is_causal": True},
    "additive": {"attn_mask": torch.where(_MASK, 0.5, -torch.inf).double()},
}
#: Scores by name: functions with the arguments of `scaled_dot_product_attention`.
SCORES: dict[str, Callable[..., Tensor]] = {
    "dot product": lambda *a, **k: _compute_dot_attention(*a, **k),
    "umbral": functional.cone_attention,
    "penumbral": lambda *a, **k: functional.cone_attention(*a, **k, variant="penumbral"),
    "penumbral heights": lambda *a, **k: functional.cone_attention(
        *a, **k, variant="penumbral", squared=False
    ),
    "geodesic": lambda *a, **k: functional.hyperbolic_attention(*a, **k, aggregation="mean"),
    "midpoint": lambda *a, **k: functional.hyperbolic_attention(
        *a, **k, distance="squared_lorentz"
    ),
    "hype": lambda *a, **k: functional.hype_attention(*a, **k, mu=0.1, tau=2.0),
}


def _compute_dot_attention(
    query, key, value, attn_mask=None, is_causal=False, enable_gqa=False, *, backend
):
    options = Options(mask=attn_mask, is_causal=is_causal)
    return attention(dot_score(query, key), value, options, backend=backend)[0]


#: Dtypes that are checked by default.
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def check_engine(
    name: str, dtypes: Iterable[torch.dtype] = DTYPES, refuses: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Check that an engine agrees with `reference` in float64, forward and backward.

    Args:
        name: Registered name of the engine. Calls that it passes on to another engine count as its
            own.
        dtypes: Dtypes of queries, keys and values.
        refuses: Expected refusals. The key is a regular expression for whole names of checks:
            "engine-score-call-dtype", as `str(check)` returns. The value is a regular expression
            for the one-line ValueError. Any other refusal fails.

    Returns:
        Number of checks that held ("held"), and of checks that were refused as expected
        ("refused").

    Raises:
        ContractError: One line that names the score, the call and the error.
        ValueError: No engine has that name, no check has a name from `refuses`, or all checks are
            refused.
    """
    return run_checks(name, engine_checks(name, dtypes, refuses))


def engine_checks(
    name: str, dtypes: Iterable[torch.dtype] = DTYPES, refuses: Mapping[str, str] | None = None
) -> list[EngineCheck]:
    """Return the checks of `check_engine`, so that each one can be a test of its own.

    Args:
        name, dtypes, refuses: As in `check_engine`.

    Returns:
        One callable for each score, call and dtype.

    Raises:
        ValueError: No engine has that name, or no check has a name from `refuses`.
    """
    if name not in available_engines():
        raise ValueError(f"backend={name!r} is unknown; allowed: {', '.join(available_engines())}")
    checks = [
        EngineCheck(engine=name, score=score, call=call, dtype=dtype)
        for score, call, dtype in product(SCORES, CALLS, dtypes)
    ]
    return expect_refusals(checks, refuses)
