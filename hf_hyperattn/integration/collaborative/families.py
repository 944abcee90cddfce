"""Families whose projections of queries and keys can be shared.

In these the host's queries and keys are the outputs of their projections, reshaped into heads and nothing else: no
rotation, no norm, no second use. `tests/integration/test_collaborative_families.py` converts each at full rank.
"""

from __future__ import annotations

from ...mechanisms.base import Host

#: By the model type of the host's config.
SHAREABLE = frozenset(
    [
        "bert",
        "roberta",
        "distilbert",
        "albert",
        "gpt2",
        "opt",
        "bart",
        "t5",
        "vit",
        "clip_text_model",
        "clip_vision_model",
        "whisper",
    ]
)


def check_family(host: Host) -> None:
    """Refuse hosts of other families.

    Raises:
        ValueError: the family is not known to use its projections in this way.
    """
    model_type = getattr(host.config, "model_type", "")
    if model_type not in SHAREABLE:
        raise ValueError(
            f"collaborative cannot replace the projections of {host.name}: model type {model_type!r} is not known to "
            f"use them as they are; allowed: {', '.join(sorted(SHAREABLE))}, or patch_model with "
            "CollaborativeConfig(), which replaces nothing"
        )
