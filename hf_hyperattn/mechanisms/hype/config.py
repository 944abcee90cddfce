"""Configuration of HyPE, and what it means for a model: mu and tau of every head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ...config import MechanismConfig, option
from ...fields import LARGEST
from ...text import short
from .reference import FORMS, Form

#: tau is this many times the slope over mu, so that sinh starts with the slope and cosh ends near slope · max_length.
STRETCH = {"sinh": 1.0, "cosh": 2.0}


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi (arXiv 2108.12409), 2^(-8h/H) for h = 1 .. H; H need not be a power of two."""
    return tuple(2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1))


@dataclass(frozen=True)
class HypeConfig(MechanismConfig):
    """HyPE (arXiv 2310.19676): a positional bias that grows with the distance as sinh, or as cosh - 1.

    Numbers are for all heads, or one for each query head.
    """

    mechanism = "hype"

    mu: float | tuple[float, ...] | None = option(
        None,
        "how fast the bias bends, per token; None: 1/max_length; where it is learned, the starting value",
        symbol="μ",
        types=(float, tuple),
        above=0,
        optional=True,
    )
    tau: float | tuple[float, ...] | None = option(
        None,
        "what the bias is multiplied with; None: slope/μ for sinh, 2·slope/μ for cosh; where it is learned, the "
        "starting value",
        symbol="τ",
        types=(float, tuple),
        least=0,
        optional=True,
    )
    slopes: Literal["alibi"] | tuple[float, ...] = option(
        "alibi",
        "logits a token, which give τ where it is None: alibi for 2^(-8h/H), or one number for each head",
        symbol="m",
        types=(str, tuple),
    )
    max_length: int | None = option(
        None,
        "the length that μ = 1/max_length is made for; None: the model's max_position_embeddings",
        types=(int,),
        above=0,
        optional=True,
    )
    form: Form | None = option(
        None,
        "sinh or cosh; None: sinh where attention is causal, else cosh",
        choices=FORMS,
        optional=True,
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_numbers("mu", above=True)
        self._check_numbers("tau")
        if isinstance(self.slopes, str) and self.slopes != "alibi":
            self._refuse("slopes", "'alibi', or one number from 0 for each query head")
        self._check_numbers("slopes")
        if self.mu is not None and self.max_length is not None:
            self._refuse(
                "max_length", "None where mu is given, since it only says that mu = 1/max_length"
            )
        if self.tau is not None and self.slopes != "alibi":
            self._refuse("slopes", "'alibi' where tau is given, since slopes only say what tau is")

    def _check_numbers(self, name: str, above: bool = False) -> None:
        """The entries of a tuple obey the rule that a single number does."""
        values = getattr(self, name)
        if not isinstance(values, tuple):
            return
        for x in values:
            number = isinstance(x, int | float) and not isinstance(x, bool)
            if not number or not 0 <= x < LARGEST or (above and x == 0):
                self._refuse(
                    name,
                    f"finite numbers {'above' if above else 'from'} 0, one for each query head",
                )
        if not values:
            self._refuse(name, "at least one number")

    def for_model(self, config: object) -> HypeConfig:
        """This config with the model's `max_position_embeddings` as `max_length`, where that is what it means.

        Raises:
            ValueError: neither this config nor the model's says a length.
        """
        if self.mu is not None or self.max_length is not None:
            return self
        length = getattr(config, "max_position_embeddings", None)
        if not isinstance(length, int) or isinstance(length, bool) or length <= 0:
            raise ValueError(
                f"HypeConfig.max_length=None means the model's max_position_embeddings, and "
                f"{type(config).__name__} has {short(length)} there; allowed: HypeConfig(max_length=...) or "
                "HypeConfig(mu=...)"
            )
        return replace(self, max_length=length)

    def start(self, form: str, heads: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """mu and tau as configured, one number each or one for each query head.

        Raises:
            ValueError: there are numbers for another count of heads, or no length is known.
        """
        for name in ("mu", "tau", "slopes"):
            values = getattr(self, name)
            if isinstance(values, tuple) and len(values) != heads:
                raise ValueError(
                    f"HypeConfig.{name} has {len(values)} numbers; allowed: one, or one for each of the "
                    f"{heads} query heads"
                )
        resolved: Any = self if self.mu is not None else self.for_model(None)
        mu = resolved.mu if resolved.mu is not None else 1.0 / resolved.max_length
        mu = mu if isinstance(mu, tuple) else (float(mu),)
        if self.tau is not None:
            return mu, self.tau if isinstance(self.tau, tuple) else (float(self.tau),)
        slopes = alibi_slopes(heads) if self.slopes == "alibi" else self.slopes
        each = mu if len(mu) > 1 else mu * heads
        tau = tuple(STRETCH[form] * m / x for m, x in zip(slopes, each, strict=True))
        if max(tau) >= LARGEST:
            self._refuse("mu", f"numbers for which the slope over mu stays below {LARGEST:g}")
        return mu, tau
