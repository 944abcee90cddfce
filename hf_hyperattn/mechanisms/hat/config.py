"""Configuration of the hierarchical attention transformer, and its layouts.

A layout says how many cross-segment blocks (C) follow each segment-wise block (S).
It is a name of the paper's, stretched to any number of segment-wise blocks, or a pattern such as "S S SC S S SC":
groups of one S and the Cs behind it, one group for each segment-wise block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from ...config import MechanismConfig, option
from ...fields import MOST_SIZE, refuse, short

Pooling = Literal["max", "mean", "tokens"]
POOLING = get_args(Pooling)
CrossBlocks = Literal["copy", "new"]
CROSS_BLOCKS = get_args(CrossBlocks)


#: The published layouts; `counts` makes them for other numbers of blocks.
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
#: Segments of a text.
MOST_SEGMENTS = 2**16
#: Characters of a pattern, each of which may be a block with weights of its own.
LONGEST_LAYOUT = 10_000


def check_layout(name: str, layout: object) -> None:
    """Raise for a layout that is neither a name nor a pattern; `name` is what the error calls it."""
    if (
        not isinstance(layout, str)
        or len(layout) > LONGEST_LAYOUT
        or not (layout in PUBLISHED or PATTERN.fullmatch(layout))
    ):
        patterns = "a pattern such as 'S S SC S S SC', one group for each segment-wise block"
        refuse(name, layout, f"{', '.join(LAYOUTS)}, or {patterns}")


def counts(layout: str, blocks: int) -> tuple[int, ...]:
    """How many cross-segment blocks follow each of the segment-wise blocks.

    Shares of the blocks, such as a third, are rounded, half up, to at least 1 where there must be one.

    Args:
        layout: one of `LAYOUTS`, or a pattern.
        blocks: L, the number of segment-wise blocks, from 1.

    Raises:
        ValueError: no such layout, or a pattern of another number of groups.
    """
    check_layout("layout", layout)
    if layout not in PUBLISHED:
        groups = tuple(group.count("C") for group in layout.split(" "))
        if len(groups) != blocks:
            raise ValueError(
                f"layout={short(layout)} has {len(groups)} groups; allowed: one for each of the {blocks} segment-wise "
                "blocks"
            )
        return groups
    # how many cross-segment blocks, and behind which segment-wise blocks
    last, share = range(blocks - 1, -1, -1), lambda part: int(part * blocks + 0.5)
    thirds, quarters = max(1, share(1 / 3)), max(1, share(1 / 4))
    number, followed = {
        "I1": (1, last),
        "I2": (2, last[::2]),
        "I3": (1, last[::2]),
        "LC1": (1, last[:thirds]),
        "LC2": (2, last[::2][:quarters]),
        "EC1": (2, range(share(1 / 4), blocks)[::2][:quarters]),
        "EC2": (1, range(share(2 / 9), blocks)[:thirds]),
        "AH": (min(4, max(1, share(1 / 2))), last[:1]),
    }[layout]
    return tuple(number if i in followed else 0 for i in range(blocks))


def has_cross_blocks(layout: str) -> bool:
    """Whether some block of a layout attends across segments."""
    return layout in PUBLISHED or "C" in layout


@dataclass(frozen=True)
class HatConfig(MechanismConfig):
    """Hierarchical Attention Transformer (arXiv 2210.05529): blocks within segments, and blocks across them.

    A change of architecture: `hf_hyperattn.convert(model, HatConfig())`.
    """

    mechanism = "hat"

    segment_length: int = option(
        128,
        "tokens of a segment, its CLS token included; at most the pretrained positions",
        symbol="K",
        least=2,
        most=MOST_SIZE,
    )
    layout: str = option(
        "I1",
        f"which cross-segment blocks follow which segment-wise blocks: {', '.join(LAYOUTS)}, or a pattern such as "
        "'S S SC S S SC', one group for each pretrained layer",
    )
    max_length: int = option(8192, "the most tokens of a text", least=1, most=MOST_SIZE)
    cross_blocks: CrossBlocks = option(
        "copy",
        "copy: cross-segment blocks start as the pretrained layer of their segment-wise block; new: at random",
        choices=CROSS_BLOCKS,
    )
    gated: bool = option(
        False,
        "whether the output of each cross-segment block is blended in with a learned gate, 0 at first; the published "
        "model has none",
    )
    pooling: Pooling = option(
        "max",
        "what a text's vector is made of: max or mean over its segments' CLS rows, or tokens, the mean over all tokens",
        choices=POOLING,
    )
    cls_token_id: int | None = option(
        None,
        "the token that leads every segment, put before texts that do not begin with it; None: the first token of "
        "each text, which tokenizers of these models make [CLS] or <s>",
        types=(int,),
        least=0,
        most=MOST_SIZE,
        optional=True,
    )

    def __post_init__(self):
        super().__post_init__()
        check_layout("HatConfig.layout", self.layout)
        longest = MOST_SEGMENTS * (self.segment_length - 1)
        if self.max_length > longest:  # a row of weights for every segment
            self._refuse("max_length", f"up to {longest:,}, which makes {MOST_SEGMENTS:,} segments")
        if not has_cross_blocks(self.layout):
            for name, default in (("cross_blocks", "copy"), ("gated", False)):
                if getattr(self, name) != default:
                    self._refuse(
                        name,
                        f"{default!r}, since layout={short(self.layout)} has no cross-segment block",
                    )
