"""Define the configuration of HyPE.

Here you learn which settings exist, and how mu and tau of every head follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ...config import MechanismConfig, option
from ...config.fields import LARGEST
from ...utils.text import short
from .reference import FORMS, Form

#: tau is STRETCH · slope / mu. The sinh form then starts with this slope, and the cosh form ends near
#: slope · max_length.
STRETCH = {"sinh": 1.0, "cosh": 2.0}


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of ALiBi (arXiv 2108.12409), 2^(-8h/H) for h = 1 .. H.

    H need not be a power of two.
    """
    return tuple(2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1))


@dataclass(frozen=True)
class HypeConfig(MechanismConfig):
    """Configuration of HyPE (arXiv 2310.19676).

    The positional bias grows with the distance as sinh, or as cosh - 1. Settings are one number for
    all heads, or one per query head.
    """

    mechanism = "hype"

    mu: float | tuple[float, ...] | None = option(
        None,
        "how fast the bias bends, per token; None: 1/max_length; where it is learned, the starting value",
        symbol="μ",
        types=(float, tuple),
        above=0,
        per_head=True,
    )
    tau: float | tuple[float, ...] | None = option(
        None,
        "what the bias is multiplied with; None: slope/μ for sinh, 2·slope/μ for cosh; where it is learned, the "
        "starting value",
        symbol="τ",
        types=(float, tuple),
        least=0,
        per_head=True,
    )
    slopes: Literal["alibi"] | tuple[float, ...] = option(
        "alibi",
        "logits a token, which give τ where it is None: alibi for 2^(-8h/H), or one number for each head",
        symbol="m",
        types=(str, tuple),
        least=0,
        per_head=True,
    )
    max_length: int | None = option(
        None,
        "the length that μ = 1/max_length is made for; None: the model's max_position_embeddings",
        types=(int,),
        above=0,
    )
    form: Form | None = option(
        None,
        "sinh or cosh; None: sinh where attention is causal, else cosh",
        choices=FORMS,
    )

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.slopes, str) and self.slopes != "alibi":
            self._refuse("slopes", "'alibi', or one number from 0 for each query head")
        if self.mu is not None and self.max_length is not None:
            self._refuse(
                "max_length", "None where mu is given, since it only says that mu = 1/max_length"
            )
        if self.tau is not None and self.slopes != "alibi":
            self._refuse("slopes", "'alibi' where tau is given, since slopes only say what tau is")

    def for_model(self, config: object) -> HypeConfig:
        """Return a copy whose `max_length` comes from the model, if it is needed and not given.

        Args:
            config: Config of the model, with `max_position_embeddings`.

        Raises:
            ValueError: Neither this config nor the model's has a length.
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

    def compute_starts(self, form: str, heads: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the configured mu and tau, each one number or one per query head.

        Args:
            form: "sinh" or "cosh".
            heads: Number of query heads.

        Raises:
            ValueError: There are numbers for another count of heads, or no length is known.
        """
        for name in ("mu", "tau", "slopes"):
            values = getattr(self, name)
            if isinstance(values, tuple) and len(values) != heads:
                raise ValueError(
                    f"HypeConfig.{name} has {len(values)} numbers; allowed: one, or one for each of the "
                    f"{heads} query heads"
                )
        resolved: Any = self.for_model(None)
        mu = resolved.mu if resolved.mu is not None else 1.0 / resolved.max_length
        if not isinstance(mu, tuple):
            mu = (float(mu),)
        if self.tau is not None:
            tau = self.tau if isinstance(self.tau, tuple) else (float(self.tau),)
            return mu, tau
        # Without a tau, the slopes give it.
        slopes = alibi_slopes(heads) if self.slopes == "alibi" else self.slopes
        each = mu if len(mu) > 1 else mu * heads
        tau = tuple(STRETCH[form] * m / x for m, x in zip(slopes, each, strict=True))
        if max(tau) >= LARGEST:
            self._refuse("mu", f"numbers for which the slope over mu stays below {LARGEST:g}")
        return mu, tau
