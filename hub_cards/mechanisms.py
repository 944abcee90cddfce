"""What a card says about each mechanism: stage, one sentence, the papers, and a limit where one is known.

A mechanism that is not listed here (one made outside this project) is described by the ``about`` argument of
the renderers, and without it by its name alone. Sources: the papers named; the limits are those of the
definitions.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class About:
    """Stage, what is changed, papers as (title, arXiv id), and limits, each one sentence."""

    stage: str = ""
    what: str = ""
    papers: tuple[tuple[str, str], ...] = ()
    limits: tuple[str, ...] = field(default=())


CONEHEADS = ("Coneheads: Hierarchy Aware Attention", "2306.00392")
SHADOW_CONES = ("Shadow Cones: A Generalized Framework for Partial Order Embeddings", "2305.15215")
ALIBI = (
    "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
    "2108.12409",
)
HSA = (
    "Hierarchical Self-Attention: Generalizing Neural Attention Mechanics to Multi-Scale Problems",
    "2509.15448",
)
HAT = (
    "An Exploration of Hierarchical Attention Transformers for Efficient Long Document Classification",
    "2210.05529",
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
        (("Hyperbolic Attention Networks", "1805.09786"),),
    ),
    "hype": About(
        "bias",
        "A hyperbolic sine (causal) or cosine (both directions) of the distance is added to the logits.",
        (("HyPE: Attention with Hyperbolic Biases for Relative Positional Encoding", "2310.19676"), ALIBI),
        ("The paper that proposed this bias reports no experiments.",),
    ),
    "hsa": About(
        "structure",
        "Logits between different blocks of a tree over the sequence are tied: one value stands for many.",
        (HSA,),
        ("Tied logits are an approximation: the output differs from that of untied attention.",),
    ),
    "head_fusion": About(
        "fusion",
        "Each head's output is weighted per token by attention over the heads, before the output projection.",
    ),
    "talking_heads": About(
        "mixing",
        "Logits are mixed across heads before the softmax, and weights after it, by learned square matrices.",
        (("Talking-Heads Attention", "2003.02436"),),
        ("The weights of a row need not sum to 1 after mixing.",),
    ),
    "collaborative": About(
        "mixing",
        "All heads share their key and query dimensions in one space, with a mixing vector per head.",
        (("Multi-Head Attention: Collaborate Instead of Concatenate", "2006.16362"),),
    ),
    "mkl": About("mixing", "The logits of each head are weighted as kernels in multiple kernel learning."),
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
            ("Fast and Simplex: 2-Simplicial Attention in Triton", "2507.02754"),
            ("Logic and the 2-Simplicial Transformer", "1909.00668"),
            ("Bidirectional Attention Flow for Machine Comprehension", "1611.01603"),
        ),
    ),
}


def lookup(name: str, about: dict | None) -> About:
    """The description of a mechanism: from ``about[name]`` (a mapping with About's fields), or the table.

    Raises ValueError where ``about[name]`` has other fields.
    """
    given = (about or {}).get(name)
    if given is None:
        return KNOWN.get(name, About())
    try:
        papers = tuple((str(title), str(arxiv)) for title, arxiv in given.get("papers", ()))
        return About(**{**given, "papers": papers, "limits": tuple(given.get("limits", ()))})
    except (TypeError, ValueError, AttributeError) as error:
        allowed = "stage, what, papers as (title, arXiv id) pairs, limits"
        raise ValueError(f"hub_cards: about[{name!r}] must be a mapping with {allowed}: {error}") from None
