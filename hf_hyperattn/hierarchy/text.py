"""From a text, and where its tokens stand in it, to the group ids of its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .ids import KIND, checked_mask, deepened_ids
from .outlines import OUTLINES

#: What `levels` of `Hierarchy.from_text` holds: names of outlines, or functions as `outlines` has them.
Level = str | Callable[[str], list]

#: Kinds of the families under the root of a text, and of one that joins two.
TEXT, PAIR = "text", "pair"

#: What stands between two texts that follow each other.
BETWEEN = "\n\n"
SOLID = re.compile(r"\S+")


def checked_levels(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Levels as a tuple.

    Raises:
        ValueError: an unknown name.
    """
    levels = (levels,) if isinstance(levels, str) or callable(levels) else tuple(levels)
    for level in levels:
        if not callable(level) and level not in OUTLINES:
            raise ValueError(
                f"level {level!r} is unknown; allowed: {', '.join(OUTLINES)}, or a function that gives the places at "
                "which parts of a text begin"
            )
    return levels


def kinds_of(levels: Sequence[Level]) -> tuple[str, ...]:
    """Names of the kinds of families, "" first, then those of the roots, then one a level."""
    return (
        "",
        TEXT,
        PAIR,
        *(level if isinstance(level, str) else level.__name__ for level in levels),
    )


def text_ids(
    text: str | Sequence[str],
    offsets: Tensor,
    levels: Sequence[Level],
    real: Tensor,
    sequence_ids: Sequence[int | None] | None = None,
) -> Tensor:
    """Group ids [length, levels] of the tokens of one text, or of two that follow each other.

    Args:
        text: the text, or both.
        offsets: int64 [length, 2], first character of every token and one past the last; (0, 0) at special tokens.
        levels: coarse to fine.
        real: bool [length], False at padding.
        sequence_ids: for two texts, 0 or 1 for every token, None at special ones.

    Raises:
        ValueError: offsets beyond the text; two texts without sequence_ids.
    """
    kinds, special = kinds_of(levels), (offsets == 0).all(1)
    named = [([0], TEXT)]
    if not isinstance(text, str):
        second = checked_second(text, sequence_ids, len(offsets))
        start = len(text[0]) + len(BETWEEN)
        offsets = offsets + start * (second & ~special)[:, None]
        text, named = BETWEEN.join(text), [([0], PAIR), ([0, start], TEXT)]
    beyond = ((offsets[:, 1] > len(text)) & real).nonzero()[:1, 0].tolist()
    if beyond:
        raise ValueError(
            f"token {beyond[0]} ends at character {int(offsets[beyond[0], 1])} of a text of {len(text)}; allowed: the "
            "offsets that the tokenizer gave for this very text"
        )
    for level in levels:
        outline, kind = (
            (OUTLINES[level], level) if isinstance(level, str) else (level, level.__name__)
        )
        named += [(starts, kind) for starts in outline(text)]
    place = first_characters(text, offsets)
    alone = len(text) + torch.arange(len(offsets))
    columns: list[Tensor] = []
    for starts, kind in named:
        group = torch.searchsorted(torch.tensor(starts), place, right=True) - 1
        group = torch.where(special, alone, group) if columns else torch.zeros_like(group)
        columns.append(group + KIND * kinds.index(kind))
    return torch.where(real[:, None], torch.stack(columns, 1), -1)


def outline_ids(
    text, offsets, levels: tuple[Level, ...], attention_mask, sequence_ids
) -> tuple[Tensor, tuple]:
    """Group ids [batch, length, levels] and names of kinds; arguments as in `Hierarchy.from_text`."""
    text = [text] if isinstance(text, str) else list(text)
    offsets = torch.as_tensor(offsets).long().cpu()
    offsets = offsets[None] if offsets.dim() == 2 else offsets
    if offsets.dim() != 3 or offsets.shape[2] != 2 or len(offsets) != len(text):
        raise ValueError(
            f"offsets have shape {tuple(offsets.shape)} for {len(text)} texts; allowed: [batch, length, 2], one row a "
            "text"
        )
    real = torch.ones(offsets.shape[:2], dtype=torch.bool)
    real = real if attention_mask is None else checked_mask(attention_mask, offsets.shape[1])
    sequence_ids = [None] * len(text) if sequence_ids is None else sequence_ids
    rows = zip(text, offsets, real, sequence_ids, strict=True)
    ids = [text_ids(words, places, levels, mask, numbers) for words, places, mask, numbers in rows]
    most = max(row.shape[1] for row in ids)
    return torch.stack([deepened_ids(row, most) for row in ids]), kinds_of(levels)


def checked_second(text: Sequence[str], sequence_ids, length: int) -> Tensor:
    """Bool [length]: which tokens belong to the second of two texts."""
    if len(text) != 2 or sequence_ids is None or len(sequence_ids) != length:
        raise ValueError(
            "a pair of texts needs sequence_ids, one a token: 0 or 1, None at special tokens; take "
            "encoding.sequence_ids(row)"
        )
    return torch.tensor([number == 1 for number in sequence_ids])


def first_characters(text: str, offsets: Tensor) -> Tensor:
    """int64 [length]: the first character of every token that is no space, or its very first where all are."""
    runs = torch.tensor([match.span() for match in SOLID.finditer(text)] or [(0, 0)])
    begin = offsets[:, 0].contiguous()
    run = torch.searchsorted(runs[:, 1].contiguous(), begin, right=True).clamp(max=len(runs) - 1)
    solid = torch.maximum(begin, runs[run, 0])
    return torch.where(solid < offsets[:, 1], solid, begin)
