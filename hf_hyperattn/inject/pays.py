"""Find the shortest text length at which a patched model is faster than the original.

`pays_from` halves or doubles the length until the comparison changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from ..analysis.cost import attention_times

#: Shortest and longest text that is timed, in tokens.
SHORTEST, LONGEST = 128, 8192
#: Texts are timed up to this multiple of the length that the rules were chosen for.
BEYOND = 4
#: Relative time differences below this count as equal.
NOISE = 0.02


@dataclass(frozen=True)
class Pays:
    """Attention times by text length.

    Args:
        start: Shortest timed length such that it and all longer ones were faster. None if the
            longest one was not faster.
        seconds: For each length, the seconds of all patched layers with their own attention and
            as patched.
    """

    start: int | None
    seconds: dict[int, tuple[float, float]]

    def to_sentence(self) -> str:
        """Return the result as a sentence."""
        longest = max(self.seconds)
        if self.start is None:
            return f"It is not faster at any length timed, up to {longest:,} tokens."
        return f"It is faster from {self.start:,} tokens on (timed up to {longest:,})."


def pays_from(model: PreTrainedModel, ids: Tensor, longest: int | None = None) -> Pays:
    """Time the patched layers at halved or doubled lengths until they change from slower to faster.

    Both attentions run in the same pass, layer by layer, so that other work on the machine slows
    both.

    Args:
        model: A patched model.
        ids: A text [N] or passages [B, N]. It is repeated if more tokens are needed.
        longest: Largest length that the model can read. None: no limit.
    """
    length = ids.shape[-1]
    seconds = {length: time_attention(model, ids)}
    most = min(BEYOND * length, LONGEST, longest or LONGEST)
    with silence_warnings():
        # Faster here: look for the shortest length that is still faster.
        tried = length
        while is_faster(seconds[tried]) and tried // 2 >= SHORTEST:
            tried //= 2
            seconds[tried] = time_attention(model, ids[..., :tried])
        # Not faster here: look for a longer one that is. Only one of the two loops does anything.
        tried = length
        while not is_faster(seconds[tried]) and tried * 2 <= most:
            tried *= 2
            repeats = (*(1,) * (ids.dim() - 1), tried // length)
            seconds[tried] = time_attention(model, ids.repeat(repeats))
    return Pays(find_start(seconds), dict(sorted(seconds.items())))


def find_start(seconds: dict[int, tuple[float, float]]) -> int | None:
    """Return the shortest length such that it and all longer ones were faster, or None."""
    start = None
    for length in sorted(seconds, reverse=True):
        if not is_faster(seconds[length]):
            break
        start = length
    return start


def time_attention(model: PreTrainedModel, ids: Tensor) -> tuple[float, float]:
    """Return the seconds of the original attention and of the patched one."""
    # A first pass, not counted, pays for one-time setup such as compiled kernels.
    attention_times(model, ids)
    return attention_times(model, ids)


def is_faster(seconds: tuple[float, float]) -> bool:
    """Return whether the second time is less than the first, beyond noise."""
    return seconds[1] < (1 - NOISE) * seconds[0]


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Suppress the warning that a text is longer than the rules were chosen for."""
    logger = logging.getLogger("hf_hyperattn")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
