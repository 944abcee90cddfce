"""Turn a text and the character offsets of its tokens into group ids.

This module shows how the outline of a text (`outlines`) becomes a hierarchy over the tokens of a
tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .ids import KIND, checked_mask, deepened_ids
from .outlines import OUTLINES

#: A level of `Hierarchy.from_text`: the name of an outline, or a function like the functions of
#: `outlines`.
Level = str | Callable[[str], list]

# Kinds of the families under the root: of one text, and of two texts.
TEXT, PAIR = "text", "pair"

# Joins two texts that follow each other. A blank line ends every kind of part.
BETWEEN = "\n\n"
SOLID = re.compile(r"\S+")


def checked_levels(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Return levels as a tuple.

    Raises:
        ValueError: An unknown name.
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
    """Return the names of the kinds of families.

    The first name is "". The kinds of roots follow, then one kind per level.
    """
    return ("", TEXT, PAIR, *map(_name_level, levels))


def _name_level(level: Level) -> str:
    """Return the name of a level, which is also the kind of its families."""
    return level if isinstance(level, str) else level.__name__


def text_ids(
    text: str | Sequence[str],
    offsets: Tensor,
    levels: Sequence[Level],
    real: Tensor,
    sequence_ids: Sequence[int | None] | None = None,
) -> Tensor:
    """Return the group ids [length, levels] of one text or of a pair of texts.

    Args:
        text: The text, or both texts.
        offsets: int64 [length, 2], the first character of every token and one past the last; (0, 0)
            at special tokens.
        levels: Coarse to fine.
        real: bool [length], False at padding.
        sequence_ids: For two texts, 0 or 1 for every token, None at special tokens.

    Raises:
        ValueError: Offsets beyond the text; two texts without sequence_ids.
    """
    kinds, special = kinds_of(levels), (offsets == 0).all(1)
    # Starts of the parts of every level, with the kind of its families. The first level is the
    # root's family.
    named = [([0], TEXT)]
    if not isinstance(text, str):
        # Shift the second text behind the first, and outline both as one text.
        second = checked_second(text, sequence_ids, len(offsets))
        start = len(text[0]) + len(BETWEEN)
        offsets = offsets + start * (second & ~special)[:, None]
        text = BETWEEN.join(text)
        named = [([0], PAIR), ([0, start], TEXT)]
    beyond = ((offsets[:, 1] > len(text)) & real).nonzero()[:1, 0].tolist()
    if beyond:
        raise ValueError(
            f"token {beyond[0]} ends at character {int(offsets[beyond[0], 1])} of a text of {len(text)}; allowed: the "
            "offsets that the tokenizer gave for this very text"
        )
    for level in levels:
        outline = OUTLINES[level] if isinstance(level, str) else level
        named += [(starts, _name_level(level)) for starts in outline(text)]

    place = first_characters(text, offsets)
    # Numbers that no part has. Special tokens are children of the root, so they are in no group
    # below it.
    unique = len(text) + torch.arange(len(offsets))
    columns: list[Tensor] = []
    for starts, kind in named:
        group = torch.searchsorted(torch.tensor(starts), place, right=True) - 1
        group = torch.where(special, unique, group) if columns else torch.zeros_like(group)
        columns.append(group + KIND * kinds.index(kind))
    return torch.where(real[:, None], torch.stack(columns, 1), -1)


def outline_ids(
    text, offsets, levels: tuple[Level, ...], attention_mask, sequence_ids
) -> tuple[Tensor, tuple]:
    """Return the group ids [batch, length, levels] of texts, and the names of kinds.

    Args:
        text, offsets, levels, attention_mask, sequence_ids: As in `Hierarchy.from_text`.

    Raises:
        ValueError: Offsets of another shape, or numbers of rows that differ.
    """
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
    # Texts may have different numbers of levels, for example depths of headings.
    most = max(row.shape[1] for row in ids)
    return torch.stack([deepened_ids(row, most) for row in ids]), kinds_of(levels)


def checked_second(text: Sequence[str], sequence_ids, length: int) -> Tensor:
    """Return bool [length]: which tokens belong to the second of two texts.

    Args:
        text: Both texts.
        sequence_ids: 0, 1 or None for every token.
        length: Number of tokens.

    Raises:
        ValueError: Another number of texts or of sequence_ids.
    """
    if len(text) != 2 or sequence_ids is None or len(sequence_ids) != length:
        raise ValueError(
            "a pair of texts needs sequence_ids, one a token: 0 or 1, None at special tokens; take "
            "encoding.sequence_ids(row)"
        )
    return torch.tensor([number == 1 for number in sequence_ids])


def first_characters(text: str, offsets: Tensor) -> Tensor:
    """Return int64 [length], the first character of every token that is no space.

    For a token of spaces only, it is the token's first character. Many tokenizers put the space
    before a word into the word's token, and the space would belong to the part before.

    Args:
        text: The text.
        offsets: int64 [length, 2], the first character of every token and one past the last.
    """
    runs = torch.tensor([match.span() for match in SOLID.finditer(text)] or [(0, 0)])
    begin = offsets[:, 0].contiguous()
    # The first run of solid characters that ends after the token begins.
    run = torch.searchsorted(runs[:, 1].contiguous(), begin, right=True).clamp(max=len(runs) - 1)
    solid = torch.maximum(begin, runs[run, 0])
    return torch.where(solid < offsets[:, 1], solid, begin)
