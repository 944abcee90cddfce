"""Families whose projections of queries and keys can be shared.

In these the host's queries and keys are the outputs of their projections, reshaped into heads and nothing else: no
rotation, no norm, no second use. `tests/integration/test_collaborative_families.py` holds each of them to that.
"""

from __future__ import annotations

from ...mechanisms.base import Host

#: By the model type of the host's config.
SHAREABLE = frozenset(
    """
    albert bart beit bert bert-generation biogpt blenderbot blenderbot-small blip_text_model camembert
    clip_text_model clip_vision_model data2vec-text decision_transformer deit dinov2 distilbert dpr electra
    ernie gpt2 gpt_neo hubert ijepa layoutlm m2m_100 marian mbart megatron-bert mpnet mt5 openai-gpt opt
    pegasus plbart rembert roberta roberta-prelayernorm siglip_text_model siglip_vision_model speech_to_text
    splinter switch_transformers t5 umt5 videomae vit vit_mae vit_msn vivit wav2vec2 whisper xglm xlm-roberta
    xlm-roberta-xl
    """.split()
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
