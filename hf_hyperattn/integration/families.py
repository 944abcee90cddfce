"""What single families do differently, as data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from ..mechanisms.base import FirstKey

#: Families whose query arrives multiplied by `module.scaling` are recognised by rule (see below); these are the
#: exceptions: the rule does not hold, or query and key share the factor.
SCALED_QUERY_AND_KEY = ("OpenAIPrivacyFilterAttention",)


#: Classes of families that always return their attention weights.
RETURNING_WEIGHTS = ("BridgeTower", "Mgpstr")

#: Config classes of models that have eager attention alone. Their code counts on a mask that says all, in numbers.
MASK_SAYS_ALL: set[type] = set()

#: What raises the error for model types that are out of reach of our names; filled by names.py.
UNROUTED: dict[str, Callable] = {}

#: Of the masks that `hyper.family_mask` has made and that are in use, where the keys begin that they are about.
FIRST_KEYS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_masks(model: PreTrainedModel) -> None:
    """Remember of a model that has no SDPA that its masks must be those of eager attention."""
    if not model._supports_sdpa:
        MASK_SAYS_ALL.add(type(model.config))


def note_all(model: nn.Module) -> None:
    """`note_masks` for a model that was built before this package was imported, and for its parts."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            note_masks(part)


def first_key(module: nn.Module, mask: Tensor | None, window: int | None, queries: int, keys: int) -> FirstKey:
    """Where the keys of a call begin, by its mask; unknown where a mask of another make comes with a sliding window."""
    compiling = torch.compiler.is_compiling()
    known = None if compiling or mask is None else FIRST_KEYS.get(mask)
    if known is not None:
        return known
    window = window or getattr(module, "sliding_window", None)
    unclear = isinstance(window, int) and queries < keys and keys >= window and (mask is not None or compiling)
    return FirstKey(None if unclear else 0)


def is_causal_host(module: nn.Module) -> bool:
    """Whether the module says that its queries see only earlier keys; where it says nothing, what SDPA would take."""
    return bool(getattr(module, "is_causal", position_hides(module)))


def position_hides(module: nn.Module) -> bool:
    """Whether a causal call without a mask hides later keys.

    In families with eager attention alone nothing does; hosts that `model_patches` routes (they know their stock
    class) keep to the call contract all the same.
    """
    return type(getattr(module, "config", None)) not in MASK_SAYS_ALL or hasattr(type(module), "stock_class")


def scaling_already_applied(module: nn.Module, scale: float) -> float:
    """What the query has been multiplied with before the call, 1.0 for most families.

    Whisper, OPT and their kin scale the query themselves and then pass scaling=1.0, while `module.scaling` keeps the
    factor. Families without any scaling (T5) have 1.0 there too.
    """
    factor = getattr(module, "scaling", None)
    if scale != 1.0 or not isinstance(factor, float) or factor <= 0:
        return 1.0
    return factor**2 if type(module).__name__ in SCALED_QUERY_AND_KEY else factor
