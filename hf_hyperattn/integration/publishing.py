"""What the cards of published models and adapters say beyond their files."""

from __future__ import annotations

from transformers.utils.hub import PushToHubMixin

import hub_cards

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
