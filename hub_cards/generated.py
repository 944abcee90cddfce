"""Telling a card that no person has touched from one that somebody wrote or edited.

A card made here ends with a comment that holds a digest of everything above it and of the header. A card that
Transformers or PEFT made is recognised by making the same card again. Tags are left out of both comparisons,
since Transformers adds tags to a card on every push. Whatever is not recognised is a person's work and is
kept.
"""

import hashlib
import json
import re
from functools import cache

SIGNATURE = re.compile(r"<!-- card rendered by hf-hyperattn, digest ([0-9a-f]{64}); [^>]*-->\s*\Z")
NOTE = "an edited card is kept by later pushes"
LONGEST_STUB = 20_000  #: characters; placeholders have about 5,000, and the pattern below is slow on long texts
PEFT_TAIL = re.compile(r"(### Framework versions\s*)?(- PEFT [\w.+]+\s*)+\Z")


def digest(card) -> str:
    """SHA-256 of a card's body without the signature, and of its header without the tags."""
    header = {key: value for key, value in card.data.to_dict().items() if key != "tags"}
    body = "\n".join(line.rstrip() for line in SIGNATURE.sub("", card.text).strip().splitlines())
    return hashlib.sha256(
        json.dumps([header, body], sort_keys=True, default=str).encode()
    ).hexdigest()


def sign(card):
    """Put the digest under a card that was just rendered; gives the card back."""
    body = SIGNATURE.sub("", card.text).rstrip()
    card.text = f"{body}\n\n<!-- card rendered by hf-hyperattn, digest {digest(card)}; {NOTE} -->\n"
    return card


def is_ours_untouched(card) -> bool:
    """Whether the card was rendered here and is as it was, tags aside."""
    found = SIGNATURE.search(card.text)
    return found is not None and found[1] == digest(card)


def is_stub(card) -> bool:
    """Whether the card is the one Transformers or PEFT makes for every model, as it was made."""
    return (
        len(card.text) <= LONGEST_STUB
        and PEFT_TAIL.sub("", card.text.strip()).split() in stub_texts()
    )


@cache
def stub_texts() -> tuple[list[str], ...]:
    """The words of the cards that Transformers and PEFT make."""
    from huggingface_hub import ModelCard, ModelCardData

    description = (
        "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
        "This model card has been automatically generated."
    )
    extras: tuple[dict[str, str], ...] = ({"model_description": description}, {})
    return tuple(ModelCard.from_template(ModelCardData(), **extra).text.split() for extra in extras)
