"""The config of the Hierarchical Attention Transformer, and its layouts.

A layout says how many cross-segment blocks (C) follow each segment-wise block (S). It is a name
from the paper, scaled to any number of segment-wise blocks, or a pattern such as "S S SC S S SC":
one group per segment-wise block, each an S followed by Cs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option
from ...config.fields import MOST_SIZE, refuse
from ...utils.text import short

Pooling = Literal["max", "mean", "tokens"]
POOLING = get_args(Pooling)
CrossBlocks = Literal["copy", "new"]
CROSS_BLOCKS = get_args(CrossBlocks)


#: The published layouts; `count_cross_blocks` scales them to other numbers of blocks.
PUBLISHED = {
    "I1": "SC SC SC SC SC SC",
    "I2": "S SCC S SCC S SCC",
    "I3": "S SC S SC S SC S SC",
    "LC1": "S S S S S S SC SC SC",
    "LC2": "S S S S S SCC S SCC",
    "EC1": "S S SCC S SCC S S S",
    "EC2": "S S SC SC SC S S S S",
    "AH": "S S S S S S S SCCCC",
}
LAYOUTS = tuple(PUBLISHED)
PATTERN = re.compile(r"SC*( SC*)*")
#: Largest number of segments of a text; every segment has a row of weights.
MOST_SEGMENTS = 2**16
#: Largest length of a pattern. Every character may be a block with its own weights.
LONGEST_LAYOUT = 10_000


def check_layout(name: str, layout: object) -> None:
    """Check that a layout is a name or a pattern.

    Args:
        name: Name of the layout in the message.
        layout: The layout.

    Raises:
        ValueError: It is neither.
    """
    if (
        not isinstance(layout, str)
        or len(layout) > LONGEST_LAYOUT
        or not (layout in PUBLISHED or PATTERN.fullmatch(layout))
    ):
        patterns = "a pattern such as 'S S SC S S SC', one group for each segment-wise block"
        refuse(name, layout, f"{', '.join(LAYOUTS)}, or {patterns}")


def count_cross_blocks(layout: str, blocks: int) -> tuple[int, ...]:
    """Return the number of cross-segment blocks behind each segment-wise block.

    Shares of the blocks, such as a third, are rounded half up, to at least 1 where a block is
    required.

    Args:
        layout: One of `LAYOUTS`, or a pattern.
        blocks: L, the number of segment-wise blocks, from 1.

    Raises:
        ValueError: There is no such layout, or the pattern has another number of groups.
    """
    check_layout("layout", layout)
    if layout not in PUBLISHED:
        # In a pattern, the number of Cs of a group is the answer.
        groups = tuple(group.count("C") for group in layout.split(" "))
        if len(groups) != blocks:
            raise ValueError(
                f"layout={short(layout)} has {len(groups)} groups; allowed: one for each of the {blocks} segment-wise "
                "blocks"
            )
        return groups
    from_last = range(blocks - 1, -1, -1)
    share = lambda part: int(part * blocks + 0.5)
    third = max(1, share(1 / 3))
    quarter = max(1, share(1 / 4))
    # For each layout: the number of cross-segment blocks, and the segment-wise blocks in front of
    # them.
    number, followed = {
        "I1": (1, from_last),
        "I2": (2, from_last[::2]),
        "I3": (1, from_last[::2]),
        "LC1": (1, from_last[:third]),
        "LC2": (2, from_last[::2][:quarter]),
        "EC1": (2, range(share(1 / 4), blocks)[::2][:quarter]),
        "EC2": (1, range(share(2 / 9), blocks)[:third]),
        "AH": (min(4, max(1, share(1 / 2))), from_last[:1]),
    }[layout]
    return tuple(number if i in followed else 0 for i in range(blocks))


def has_cross_blocks(layout: str) -> bool:
    """Return whether a layout has a block that attends across segments."""
    return layout in PUBLISHED or "C" in layout


@dataclass(frozen=True)
class HatConfig(MechanismConfig):
    """Hierarchical Attention Transformer (arXiv 2210.05529).

    Some blocks attend within segments, others across segments. It changes the architecture:
    `hf_hyperattn.convert(model, HatConfig())`.
    """

    mechanism = "hat"

    segment_length: int = option(
        128,
        "tokens per segment, its CLS token included; at most the pretrained positions",
        symbol="K",
        least=2,
        most=MOST_SIZE,
    )
    layout: str = option(
        "I1",
        f"which cross-segment blocks follow which segment-wise blocks: {', '.join(LAYOUTS)}, or a pattern such as "
        "'S S SC S S SC', one group for each pretrained layer",
    )
    max_length: int = option(8192, "largest number of tokens of a text", least=1, most=MOST_SIZE)
    cross_blocks: CrossBlocks = option(
        "copy",
        "copy: cross-segment blocks start as the pretrained layer of their segment-wise block; new: at random",
        choices=CROSS_BLOCKS,
    )
    gated: bool = option(
        False,
        "whether a learned gate, 0 at first, blends in the output of each cross-segment block; the published model has "
        "none",
    )
    pooling: Pooling = option(
        "max",
        "how a text's vector is made: max or mean over its segments' CLS rows; tokens: the mean over all tokens",
        choices=POOLING,
    )
    cls_token_id: int | None = option(
        None,
        "first token of every segment, put before texts that do not begin with it; None: the first token of each text, "
        "which these tokenizers make [CLS] or <s>",
        types=(int,),
        least=0,
        most=MOST_SIZE,
        optional=True,
    )

    def __post_init__(self):
        super().__post_init__()
        check_layout("HatConfig.layout", self.layout)
        longest = MOST_SEGMENTS * (self.segment_length - 1)
        # Every segment needs a row of weights.
        if self.max_length > longest:
            self._refuse("max_length", f"up to {longest:,}, which makes {MOST_SEGMENTS:,} segments")
        # These settings describe cross-segment blocks; without any, they would have no effect.
        if not has_cross_blocks(self.layout):
            for name, default in (("cross_blocks", "copy"), ("gated", False)):
                if getattr(self, name) != default:
                    self._refuse(
                        name,
                        f"{default!r}, since layout={short(self.layout)} has no cross-segment block",
                    )
