"""Every mechanism as a function, shaped like `torch.nn.functional.scaled_dot_product_attention`.

The functions are defined in the mechanisms' rooms; this module hands them on under their names:
`cone_attention`, `cone_scores`, ...
"""

from . import mechanisms  # noqa: F401  fills the registry
from .registry import MECHANISMS


def __getattr__(name: str):
    for mechanism in MECHANISMS.values():
        if name in mechanism.functions:
            return mechanism.functions[name]
    raise AttributeError(f"hf_hyperattn.functional has no {name!r}; it has: {', '.join(__dir__())}")


def __dir__():
    return sorted(name for mechanism in MECHANISMS.values() for name in mechanism.functions)
