"""What a card says about each mechanism: stage, one sentence, the papers, and a limit where one is known.

A mechanism that is not listed here (one made outside this project) is described by the ``about`` argument of
the renderers, and without it by its name alone. Sources: the papers named; the limits are those of the
definitions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .spec import refuse


@dataclass(frozen=True)
class About:
    """Stage, what is changed, papers as "title, arXiv number", and limits, each one sentence."""

    stage: str = ""
    what: str = ""
    papers: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


CONEHEADS = "Coneheads: Hierarchy Aware Attention, arXiv 2306.00392"
SHADOW_CONES = (
    "Shadow Cones: A Generalized Framework for Partial Order Embeddings, arXiv 2305.15215"
)
ALIBI = "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation, arXiv 2108.12409"
HSA = "Hierarchical Self-Attention: Generalizing Neural Attention Mechanics to Multi-Scale Problems, arXiv 2509.15448"
QUEST = "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv 2406.10774"
SINKS = "Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453"
SPARQ = "SparQ Attention, arXiv 2312.04985"
HAT = (
    "An Exploration of Hierarchical Attention Transformers for Efficient Long Document Classification, "
    "arXiv 2210.05529"
)

KNOWN = {
    "cone": About(
        "score",
        "The logit of a pair is minus the height of the apex of the lowest cone that holds both tokens, "
        "in the hyperbolic half space.",
        (CONEHEADS, SHADOW_CONES),
        (
            "Cone attention exists here for infinite light in the half space only; the forms for the ball "
            "and for light at a finite distance are not reproduced.",
        ),
    ),
    "hyperbolic": About(
        "score",
        "The logit of a pair is minus the distance of two points in hyperbolic space; values may be "
        "averaged by the Einstein midpoint.",
        ("Hyperbolic Attention Networks, arXiv 1805.09786",),
    ),
    "hype": About(
        "bias",
        "A hyperbolic sine (causal) or cosine (both directions) of the distance is added to the logits.",
        (
            "HyPE: Attention with Hyperbolic Biases for Relative Positional Encoding, arXiv 2310.19676",
            ALIBI,
        ),
        ("The paper that proposed this bias reports no experiments.",),
    ),
    "hsa": About(
        "structure",
        "Logits between different blocks of a tree over the sequence are tied: one value stands for many.",
        (HSA,),
        ("Tied logits are an approximation: the output differs from that of untied attention.",),
    ),
    "sparse": About(
        "structure",
        "Each head computes the logits of the keys alone that a rule of its own selects: near tokens, pages, clusters.",
        (QUEST, SINKS, SPARQ),
        (
            "What a rule does not select has no part in the output, which differs from that of full attention.",
        ),
    ),
    "head_fusion": About(
        "fusion",
        "Each head's output is weighted per token by attention over the heads, before the output projection.",
    ),
    "talking_heads": About(
        "mixing",
        "Logits are mixed across heads before the softmax, and weights after it, by learned square matrices.",
        ("Talking-Heads Attention, arXiv 2003.02436",),
        ("The weights of a row need not sum to 1 after mixing.",),
    ),
    "collaborative": About(
        "score",
        "All heads share their key and query dimensions in one space, with a mixing vector per head.",
        ("Multi-Head Attention: Collaborate Instead of Concatenate, arXiv 2006.16362",),
        (
            "With a rank, projections of queries and keys were replaced: the model is not the base model.",
        ),
    ),
    "mkl": About(
        "mixing", "The logits of each head are weighted as kernels in multiple kernel learning."
    ),
    "hat": About(
        "structure",
        "Segments, each led by a token of its own, are encoded apart and joined by layers across segments.",
        (HAT,),
        ("This changes the architecture: the model is not the base model even before training.",),
    ),
    "trilinear": About(
        "score",
        "Tokens attend to pairs of tokens through a trilinear form, or to single ones through BiDAF's.",
        (
            "Fast and Simplex: 2-Simplicial Attention in Triton, arXiv 2507.02754",
            "Logic and the 2-Simplicial Transformer, arXiv 1909.00668",
            "Bidirectional Attention Flow for Machine Comprehension, arXiv 1611.01603",
        ),
    ),
}


def lookup(name: str, about: Mapping | None) -> About:
    """The description of a mechanism; what the table does not say is taken from ``about[name]``, a mapping.

    Raises ValueError where ``about[name]`` has other fields than ``About``.
    """
    known, given = KNOWN.get(name, About()), (about or {}).get(name) or {}
    allowed = {field.name for field in fields(About)}
    if not isinstance(given, Mapping) or set(given) - allowed:
        raise refuse(f"about[{name!r}]", given, f"a mapping with {', '.join(sorted(allowed))}")
    extra: dict[str, Any] = {
        key: value if isinstance(value, str) else tuple(value) for key, value in given.items()
    }
    return replace(known, **{key: value for key, value in extra.items() if not getattr(known, key)})
