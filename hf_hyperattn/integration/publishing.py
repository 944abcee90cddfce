"""What leaves the program: the folder that a checkpoint is written into, and the card beside the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.tensor import DTensor
from transformers.utils.hub import PushToHubMixin

import hub_cards

from ..folders import replace_folder
from ..registry import MECHANISMS


def card_facts(published: object) -> dict | None:
    """What the card of a published object says beyond its files; None for anything that is not ours."""
    facts = hub_cards.patched_facts(published)
    if facts is not None:
        papers = {
            m.name: {"stage": m.stage, "papers": [m.paper] if m.paper else []} for m in MECHANISMS.values()
        }
        facts["about"] = papers
    return facts


hub_cards.hook_uploads(PushToHubMixin, card_facts)


@contextmanager
def checkpoint_folder(target: str | os.PathLike, published: object) -> Iterator[Path]:
    """A folder to save into, which takes the place of `target`'s checkpoint, card included, when the block ends.

    Other files of `target` stay, a person's own README.md too.
    """
    with replace_folder(target) as folder:
        with hub_cards.card_beside(folder, published, facts_for=card_facts, replaces=target):
            yield folder


def gathers_elsewhere(model: torch.nn.Module) -> bool:
    """Whether the weights are shared out among processes and another one than this writes them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_rank() != 0 and any(isinstance(p, DTensor) for p in model.parameters())
