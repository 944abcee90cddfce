"""What single families do differently, as data."""

from __future__ import annotations

from torch import nn

#: Families whose query arrives multiplied by `module.scaling` are recognised by rule (see below); these are the
#: exceptions: the rule does not hold, or query and key share the factor.
SCALED_QUERY_AND_KEY = ("OpenAIPrivacyFilterAttention",)


def scaling_already_applied(module: nn.Module, scale: float) -> float:
    """What the query has been multiplied with before the call, 1.0 for most families.

    Whisper, OPT and their kin scale the query themselves and then pass scaling=1.0, while `module.scaling` keeps the
    factor. Families without any scaling (T5) have 1.0 there too.
    """
    factor = getattr(module, "scaling", None)
    if scale != 1.0 or not isinstance(factor, float) or factor <= 0:
        return 1.0
    return factor**2 if type(module).__name__ in SCALED_QUERY_AND_KEY else factor
