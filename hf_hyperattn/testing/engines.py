"""The contract of engines: what `reference` says in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from .. import functional
from ..engines import Options, attention, available_engines, dot_score
from .checks import Expectation, Refused, run_all, with_refusals


@dataclass(frozen=True)
class EngineCheck(Expectation):
    """One score under one kind of call, by one engine; called, it compares outputs and gradients with `reference`.

    Args:
        engine: a name out of `available_engines()`.
        score: a name out of `SCORES`.
        call: a name out of `CALLS`.
        dtype: of queries, keys and values.
        refusal: what the line by which it has to be refused says, a regular expression; None: it has to hold.
    """

    engine: str
    score: str
    call: str
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.engine}-{self.score}-{self.call}-{self.dtype}".replace("torch.", "")

    def check(self) -> None:
        exact = self._run("reference", torch.float64)
        try:
            outputs = self._run(self.engine, self.dtype)
        except ValueError as error:
            raise Refused(str(error)) from error
        limits = {
            torch.float64: (1e-9, 1e-7),
            torch.float32: (2e-4, 2e-3),
            torch.bfloat16: (3e-2, 6e-2),
        }[self.dtype]
        for place, (one, other) in enumerate(zip(outputs, exact, strict=True)):
            limit = limits[0] if place == 0 else limits[1] * other.abs().max().item()
            apart = (one.double() - other).abs().max().item()
            if not apart <= limit:
                what = ("output", "gradient of query", "gradient of key", "gradient of value")[
                    place
                ]
                self.fail(f"the {what} is {apart:.1e} off, allowed: {limit:.1e}")

    def _run(self, engine: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(self.dtype).to(dtype).requires_grad_() for t in points()]
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
def points() -> tuple[Tensor, Tensor, Tensor]:
    """Queries [2, 4, 37, 8], keys and values [2, 2, 45, 8] in float64: random, round, equal and nearly equal ones."""
    g = torch.Generator().manual_seed(7)
    query, key, value = (
        torch.randn(2, h, n, 8, generator=g, dtype=torch.float64)
        for h, n in ((4, 37), (2, 45), (2, 45))
    )
    query[:, :, :8] = torch.randint(-2, 3, (2, 4, 8, 8), generator=g).double()
    key[:, :, :8] = query[:, ::2, :8]
    key[:, :, 8:16] = query[:, ::2, 8:16] + 1e-2 * torch.randn(
        2, 2, 8, 8, generator=g, dtype=torch.float64
    )
    query[..., -1][:, :, 3], key[:, :, 20] = 1.0, 0.0
    return query.bfloat16().double(), key.bfloat16().double(), value.bfloat16().double()


_MASK = torch.rand(2, 1, 37, 45, generator=torch.Generator().manual_seed(8)) < 0.7
#: Calls by what they ask for.
CALLS: dict[str, dict] = {
    "full": {},
    "causal": {"is_causal": True},
    "masked": {"attn_mask": _MASK},
    "masked and causal": {"attn_mask": _MASK, "is_causal": True},
    "additive": {"attn_mask": torch.where(_MASK, 0.5, -torch.inf).double()},
}
#: Scores by name: a function each with the arguments of `scaled_dot_product_attention`.
SCORES: dict[str, Callable[..., Tensor]] = {
    "dot product": lambda *a, **k: _dot(*a, **k),
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


def _dot(query, key, value, attn_mask=None, is_causal=False, enable_gqa=False, *, backend):
    options = Options(mask=attn_mask, is_causal=is_causal)
    return attention(dot_score(query, key), value, options, backend=backend)[0]


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def check_engine(
    name: str, dtypes: Iterable[torch.dtype] = DTYPES, refuses: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Check that an engine agrees with `reference` in float64, forward and backward.

    Args:
        name: as it is registered. What it passes on to another engine counts as its own.
        dtypes: of queries, keys and values.
        refuses: the checks that it has to refuse, by a ValueError of one line: regular expressions, of whole names of
            checks ("engine-score-call-dtype", as `str(check)` gives it) and of what the error says. Any other refusal
            fails.

    Returns:
        How many checks held ("held"), and how many were refused as expected ("refused").

    Raises:
        ContractError: one line that names the score, the call and how far it is off.
        ValueError: no engine has that name, no check has a name out of `refuses`, or all are refused.
    """
    return run_all(name, engine_checks(name, dtypes, refuses))


def engine_checks(
    name: str, dtypes: Iterable[torch.dtype] = DTYPES, refuses: Mapping[str, str] | None = None
) -> list[EngineCheck]:
    """The checks of `check_engine`, which see, for a test of their own each."""
    if name not in available_engines():
        raise ValueError(f"backend={name!r} is unknown; allowed: {', '.join(available_engines())}")
    checks = [
        EngineCheck(name, score, call, dtype)
        for score, call, dtype in product(SCORES, CALLS, dtypes)
    ]
    return with_refusals(checks, refuses)
