"""From which length of text on a patched model takes less time than its own attention would, on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from ..analysis.cost import attention_times

#: The shortest and the longest text that is timed.
SHORTEST, LONGEST = 128, 8192
#: Up to so many times the length that rules were chosen for.
BEYOND = 4
#: Times that differ by less are called equal.
NOISE = 0.02


@dataclass(frozen=True)
class Pays:
    """What was timed.

    Args:
        start: the shortest length timed from which on all longer ones were faster; None where the longest was not.
        seconds: of all patched layers by length: by their own attention, and as patched.
    """

    start: int | None
    seconds: dict[int, tuple[float, float]]

    def text(self) -> str:
        """As a sentence."""
        longest = max(self.seconds)
        if self.start is None:
            return f"It is not faster at any length timed, up to {longest:,} tokens."
        return f"It is faster from {self.start:,} tokens on (timed up to {longest:,})."


def pays_from(model: PreTrainedModel, ids: Tensor, longest: int | None = None) -> Pays:
    """Time the patched layers at halved or doubled lengths until they change from slower to faster.

    Both attentions run in one pass, one after the other in every layer, so that other work on the machine slows both.

    Args:
        model: patched. ids: a text [N] or passages [B, N]; it is repeated where more is needed.
        longest: what the model reads at most.
    """
    length = ids.shape[-1]
    seconds = {length: timed(model, ids)}
    most = min(BEYOND * length, LONGEST, longest or LONGEST)
    with unheard():
        at = length
        while faster(seconds[at]) and at // 2 >= SHORTEST:
            at //= 2
            seconds[at] = timed(model, ids[..., :at])
        at = length
        while not faster(seconds[at]) and at * 2 <= most:
            at *= 2
            seconds[at] = timed(model, ids.repeat(*(1,) * (ids.dim() - 1), at // length))
    start = None
    for at in sorted(seconds, reverse=True):
        if not faster(seconds[at]):
            break
        start = at
    return Pays(start, dict(sorted(seconds.items())))


def timed(model: PreTrainedModel, ids: Tensor) -> tuple[float, float]:
    """Seconds of stock attention and as patched; what is set up on first use is no part of them."""
    attention_times(model, ids)
    return attention_times(model, ids)


def faster(seconds: tuple[float, float]) -> bool:
    """Whether the second is less than the first, beyond noise."""
    return seconds[1] < (1 - NOISE) * seconds[0]


@contextmanager
def unheard() -> Iterator[None]:
    """Without the warning that a text is longer than what rules were chosen for."""
    logger = logging.getLogger("hf_hyperattn")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
