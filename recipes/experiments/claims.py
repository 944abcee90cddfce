"""Every claim and open question of the sources: how it was tested, what came out, and the command.

docs/results/evidence.md is made of this. Numbers stand here only as functions of committed results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as of

from . import findings as f
from .findings import HOLDS, NOT_RUN, PARTLY, Found

#: The sources, by the letter that their claims begin with.
SOURCES = {
    "A": "Cone attention: Coneheads (arXiv 2306.00392)",
    "B": "Hyperbolic-distance attention (arXiv 1805.09786 and secondary sources)",
    "C": "Hierarchical Self-Attention",
    "D": "HyPE (arXiv 2310.19676)",
    "E": "Heads, kernels, triples of tokens",
    "K": "The package itself",
}
GRID = "equal to the width of the grid"
GPU = "needs a GPU, not run"
HUB = "needs data or a checkpoint that only the Hub has"


@dataclass(frozen=True)
class Claim:
    """A row of the page.

    Args:
        key: a letter of `SOURCES` and a number.
        said: what the source says or asks.
        test: what was done, with its controls.
        found: what came out, without numbers of results; or what reads them, and judges.
        verdict: where `found` is a text.
        command: what gives the result.
    """

    key: str
    said: str
    test: str
    found: str | Callable[[], Found]
    verdict: str = ""
    command: str = ""


def exact(key: str, said: str, test: str, path: str, found: str = "equal to rounding") -> Claim:
    """A definition, which a test of the suite evaluates by itself."""
    return Claim(key, said, test, found, HOLDS, f"pytest {path}")


def missing(key: str, said: str, why: str, command: str = "") -> Claim:
    """A claim without a result, and the reason."""
    return Claim(key, said, "", why, NOT_RUN, command)


def in_minilm(key: str, said: str, rules: str, layers: str, more: str = "") -> Claim:
    """Rules put into three of MiniLM's layers, without training."""
    test = "three of MiniLM's six layers; aim: cosine of 0.97" + more
    return Claim(key, said, test, of(f.minilm_cosines, rules, layers, 0.97), command=MINILM)


DEPTH, LENGTH, HAT = (
    f"python recipes/experiments {name}" for name in ("depth", "length", "hat_imdb")
)
PRUNING, TRANSLATION, ADAPTATION = (
    f"python recipes/experiments {name}" for name in ("head_pruning", "translation", "adaptation")
)
HYPERBOLICITY, MINILM = (
    "python recipes/experiments hyperbolicity",
    "python recipes/experiments hsa_minilm",
)
#: The common tests; docs/results/evidence.md describes each under these names.
LCA = "WordNet depth task, ten seeds"
GRAPHS = "python recipes/experiments graphs"
GRAPH = "package graph, three seeds"
START = "python recipes/experiments starts"
STARTS = "WordNet depth task from another start, three seeds"
VISION = "python recipes/experiments vision"
IMAGES = "small DeiT, three seeds"
HELP = "translation, three seeds"
LORA = "SmolLM2 with LoRA, with and without the mechanism, three seeds"
HYP, PSI, XI, PEN = (
    "hyperbolic distance",
    "umbral cone, psi",
    "umbral cone, xi",
    "penumbral cone, psi",
)
EUCLID = "Euclidean distance"

CLAIMS = (
    # --- A
    exact(
        "A1",
        "umbral cone attention",
        "a search for the ancestor on a grid",
        "tests/mechanisms/cone/test_cone.py",
        GRID,
    ),
    exact(
        "A2",
        "penumbral cone attention",
        "the same, in both branches",
        "tests/mechanisms/cone/test_cone.py",
        GRID,
    ),
    exact(
        "A3",
        "the mappings psi, xi and the exponential map",
        "against their formulas",
        "tests/mechanisms/cone/test_cone.py",
    ),
    Claim(
        "A4",
        "umbral with psi is the best pairing",
        LCA,
        of(f.depth_gain, PSI, 10, controls=(XI, PEN)),
        command=DEPTH,
    ),
    Claim(
        "A5",
        "works in any Transformer",
        "tiny models of every type of Transformers, by name and patched",
        "most types work; docs/compatibility.md has the others with the reason",
        PARTLY,
        "make zoo",
    ),
    Claim(
        "A6",
        "gamma 0.4 for text is better than 1",
        STARTS,
        of(f.start_gain, PSI, "gamma 0.4"),
        command=START,
    ),
    Claim("A7", "gains in DeiT", IMAGES, of(f.vision_gain, PSI, 1.0), command=VISION),
    Claim("A8", "gains in graph attention", GRAPH, of(f.graph_gain, PSI), command=GRAPHS),
    Claim(
        "A9",
        "one BLEU more than dot product (IWSLT'14 German-English)",
        HELP,
        of(
            f.translation_gain,
            PSI,
            32,
            {"dot product": ("dot product", 32), EUCLID: (EUCLID, 32)},
            1.0,
        ),
        command=TRANSLATION,
    ),
    Claim(
        "A9a",
        "the same with the mapping xi, which the first three seeds picked",
        HELP.replace("three seeds", "six other seeds"),
        of(f.translation_again, XI, ("dot product", EUCLID)),
        command=TRANSLATION,
    ),
    missing(
        "A10",
        "two points more on ImageNet with DeiT-S",
        f"{GPU}; ImageNet is not available here",
        "python recipes/experiments vision --full --data FOLDER",
    ),
    Claim(
        "A11",
        "width 16 equals dot product at 128, with 20 % fewer parameters",
        HELP + "; width 8 against 32",
        of(f.translation_narrow, PSI, 8, 32),
        command=TRANSLATION,
    ),
    Claim(
        "A12",
        "first experiment: better than dot product on a small language task",
        LORA,
        of(f.adapted, "cone", "distance", "cosine"),
        command=ADAPTATION,
    ),
    Claim(
        "A12a",
        "it can learn to replace a pretrained model's own attention",
        "k layers of SmolLM2 replaced and distilled, three seeds",
        lambda: f.both(*(of(f.recovered, XI, k) for k in ("1", "3", "10"))),
        command="python recipes/experiments recovered",
    ),
    Claim(
        "A13",
        "first experiment: psi is better than xi",
        LCA,
        of(f.depth_gain, PSI, 10, controls=(XI,)),
        command=DEPTH,
    ),
    Claim(
        "A14",
        "first experiment: smaller widths are enough",
        LCA + "; a tenth of the parameters",
        of(f.depth_tenth, XI, 10),
        command=DEPTH,
    ),
    missing("A15", "scales to DeiT-B and ViT-L", GPU),
    Claim(
        "A16",
        "time at 512 tokens and more",
        "compared with SDPA on a CPU, forward and backward",
        "faster than torch's SDPA on one CPU at every length; docs/performance.md",
        HOLDS,
        "make bench",
    ),
    Claim(
        "A17",
        "gamma from 0.1 to 1 by mappings matters",
        f"{STARTS}; {IMAGES}",
        of(f.gammas, (PSI, XI), "gamma 0.1"),
        command=f"{START}; {VISION}",
    ),
    missing("A18", "works with billions of parameters", GPU),
    Claim(
        "A19",
        "open: is it sensitive to where it starts?",
        STARTS,
        of(f.any_start, (PSI, XI, HYP), "projections x 4"),
        command=START,
    ),
    Claim(
        "A20",
        "memory grows with all pairs",
        "engines by blocks, memory measured",
        "memory is linear in the length; time is not",
        HOLDS,
        "make bench",
    ),
    exact(
        "A21",
        "NaN signals errors",
        "extreme inputs in every dtype",
        "tests/mechanisms/cone/test_cone.py",
        "finite",
    ),
    Claim(
        "A22",
        "gains only if data are hierarchical",
        LCA,
        of(f.deeper, XI),
        command=DEPTH,
    ),
    missing("A23", "open: cones in the ball, finite light", "not published, not built"),
    # --- B
    exact(
        "B1",
        "distance by Moebius addition",
        "textbook formulas and geoopt",
        "tests/geometry/test_poincare.py",
    ),
    exact(
        "B2",
        "exponential and logarithmic maps",
        "each other's inverse, and geoopt",
        "tests/geometry/test_poincare.py",
    ),
    exact(
        "B3",
        "softmax of minus distance over temperature",
        "against the formula",
        "tests/mechanisms/hyperbolic/test_hyperbolic.py",
    ),
    exact(
        "B4",
        "Einstein midpoint",
        "least squared Lorentz distance",
        "tests/geometry/test_poincare.py",
        "equal in Klein's coordinates; a source's formula for Poincaré's is wrong",
    ),
    exact(
        "B5",
        "projections in tangent space",
        "the module against its formula",
        "tests/mechanisms/hyperbolic/test_hyperbolic_module.py",
    ),
    exact(
        "B6",
        "curvature and temperature, learned",
        "gradients",
        "tests/mechanisms/hyperbolic/test_hyperbolic_gradients.py",
    ),
    exact(
        "B7",
        "points are kept in the ball",
        "points at and beyond the rim",
        "tests/geometry/test_limits.py",
    ),
    Claim(
        "B8",
        "accuracy 68 to 92 % (depth 5), 45 to 88 % (10)",
        LCA + "; controls without geometry",
        lambda: f.both(
            of(f.depth_level, HYP, 5, 92),
            of(f.depth_gain, HYP, 5, claimed=24),
            of(f.depth_level, HYP, 10, 88),
            of(f.depth_gain, HYP, 10, claimed=43),
        ),
        command=DEPTH,
    ),
    Claim(
        "B8a",
        "hyperbolic distance is better on hierarchies",
        LCA + "; mean over depths and sizes",
        of(f.depth_everywhere, HYP),
        command=DEPTH,
    ),
    Claim(
        "B9",
        "equal quality with a tenth of the parameters",
        LCA,
        lambda: f.both(of(f.depth_tenth, HYP, 5), of(f.depth_tenth, HYP, 10)),
        command=DEPTH,
    ),
    Claim(
        "B10",
        "0.5 µs for a distance, 50 for attention at 64 tokens",
        "CPU time of calls on one thread",
        f.ball_times,
        command="python recipes/experiments operations",
    ),
    exact(
        "B11",
        "norm / (1 - norm) tells depth",
        "grows with the distance from the origin",
        "tests/geometry/test_poincare.py",
        "as a function of the distance; whether models use it: B12",
    ),
    Claim(
        "B12",
        "near the origin is abstract, equal radius is equal level",
        "norms of keys against node level; control: Euclidean distance",
        of(f.ball_orders, 10),
        command=HYPERBOLICITY,
    ),
    Claim(
        "B12a",
        "the same in pretrained models",
        "norms of words against WordNet's depth, at fixed frequency",
        lambda: f.both(of(f.words_order, "SmolLM2"), of(f.words_order, "MiniLM")),
        command=HYPERBOLICITY,
    ),
    Claim(
        "B12b",
        "hyperbolic distance and cones read hierarchy from a pretrained model",
        "hypernym task on frozen MiniLM, six seeds",
        lambda: f.both(of(f.hypernyms, HYP), of(f.hypernyms, PSI)),
        command="python recipes/experiments hypernyms",
    ),
    Claim(
        "B12c",
        "the same for diseases and phenotypes",
        "as B12b, with ICD-10-CM and the human phenotype ontology",
        lambda: f.both(
            *(
                of(f.hypernyms, kind, source)
                for source in ("ICD-10", "phenotypes")
                for kind in (HYP, PSI)
            )
        ),
        command="python recipes/experiments hypernyms",
    ),
    Claim(
        "B12d",
        "the same as B12a for diseases and phenotypes",
        "norms of names against their depth, at fixed length",
        lambda: f.both(
            *(
                of(f.names_order, model, source)
                for source in ("ICD-10", "phenotypes")
                for model in ("SmolLM2", "MiniLM")
            )
        ),
        command=HYPERBOLICITY,
    ),
    Claim(
        "B13",
        "words fit into fewer dimensions in the ball",
        "WordNet's mammals, three seeds, rates searched",
        lambda: f.both(of(f.ball_gain, 2), of(f.ball_gain, 5)),
        command="python recipes/experiments ball",
    ),
    Claim("B14", "gains in graph networks", GRAPH, of(f.graph_gain, HYP), command=GRAPHS),
    Claim(
        "B15",
        "gains in translation",
        HELP,
        of(f.translation_gain, HYP, 32, {"dot product": ("dot product", 32), EUCLID: (EUCLID, 32)}),
        command=TRANSLATION,
    ),
    Claim(
        "B15a",
        "ours: its score gains in a pretrained language model",
        LORA,
        of(f.adapted, "hyperbolic, mean", "distance", "cosine"),
        command=ADAPTATION,
    ),
    Claim(
        "B15b",
        "ours: there, the Einstein midpoint gains over the mean of values",
        LORA,
        of(f.adapted, "hyperbolic", "hyperbolic, mean", "distance", "cosine"),
        command=ADAPTATION,
    ),
    # --- C
    Claim(
        "C1",
        "one construct for signals of several scales and kinds",
        "trees of text, code, pages, images, joined",
        "text, code, Markdown, quad-trees; graph: C11; no video or audio",
        PARTLY,
        "pytest tests/hierarchy/test_trees.py",
    ),
    exact(
        "C2",
        "the nearest to softmax under the tree's ties",
        "constrained optimum of random trees",
        "tests/mechanisms/hsa/test_hsa_definition.py",
    ),
    exact(
        "C3",
        "computed in time of nodes times branching",
        "sizes of trees",
        "tests/mechanisms/hsa/test_hsa_both_scale.py",
        "time and memory grow so",
    ),
    exact(
        "C4",
        "embeddings of siblings",
        "HsaEncoder against the definition",
        "tests/integration/architectures/test_hsa_encoder.py",
    ),
    Claim(
        "C5",
        "better than flat attention, IMDB from scratch",
        "one layer, three seeds, one rate for all",
        of(f.of_models, "hsa_imdb", "tree", {"flat": "flat", "no layer": "no layer"}, 5.5),
        command="python recipes/experiments hsa_imdb",
    ),
    missing("C6", "the same on Elec", "the data are in no package index"),
    Claim(
        "C7",
        "better than flat attention, text and image joined",
        "one layer, three seeds, one rate for all",
        of(f.of_models, "hsa_joined", "joined, tree", {"joined, flat": "joined, flat"}),
        command="python recipes/experiments hsa_joined",
    ),
    Claim(
        "C7a",
        "the same with two and four layers",
        "five seeds, rate searched for every row",
        lambda: f.both(of(f.joined_deep, 2), of(f.joined_deep, 4)),
        command="python recipes/experiments hsa_joined_deep",
    ),
    in_minilm(
        "C8",
        "injected into an encoder without training, it keeps the embeddings",
        "both, 2-8-64-1024, diagonal masked",
        "interleaved",
        "",
    ),
    in_minilm("C8a", "the same with tied keys (ours)", "key, 8, near 16, top 4", "chosen"),
    Claim(
        "C9",
        "cheaper models without training",
        "SmolLM2, keys tied by head, 2,048 and 8,192 tokens",
        "little perplexity lost at 20 % of pairs; copying suffers; docs/results/inject.md",
        PARTLY,
        "python benchmarks/hsa_frontier.py",
    ),
    Claim(
        "C9a",
        "ours: the same with sparse rules chosen by head",
        "SmolLM2 at 8,192 tokens, unseen texts and tasks",
        of(f.fewer_pairs, 8192, "rules with a kernel", kind="together"),
        command='python benchmarks/frontier.py --length 8192 --only "rules with a kernel" --kind together',
    ),
    Claim(
        "C9b",
        "ours: 60 distillation steps recover most loss at 10 % of pairs",
        "as C9a, trained on other texts and examples",
        of(f.fewer_pairs, 8192, "rules with a kernel, healed", (0.1,), (0.7, 5.0)),
        command="python benchmarks/healing.py --length 8192 --budget 0.1 && "
        'python benchmarks/frontier.py --length 8192 --only "rules with a kernel, healed"',
    ),
    exact(
        "C10",
        "works in causal models, too",
        "key tying against full covers",
        "tests/mechanisms/hsa/test_hsa_key.py",
        "equal to rounding; tying of both sides is for encoders",
    ),
    Claim(
        "C11",
        "learning on graphs",
        "package graph with neighbourhoods as trees, five seeds",
        f.graph_trees_gain,
        command="python recipes/experiments graph_trees",
    ),
    Claim(
        "C12",
        "injection, then fine-tuning",
        "SmolLM2, LoRA after injection or before it, three seeds",
        lambda: f.both(
            *(of(f.injected_first, what) for what in ("held_out", "copying", "needle_keys"))
        ),
        command="python recipes/experiments injected_lora",
    ),
    # --- D
    exact("D1", "bias tau·sinh(mu(j - i))", "forty digits", "tests/mechanisms/hype/test_hype.py"),
    exact(
        "D2",
        "as columns of queries and keys",
        "every dtype, long ranges",
        "tests/mechanisms/hype/test_hype_long.py",
        "exact with split columns; two plain ones fail in half precision",
    ),
    Claim(
        "D3",
        "ALiBi is its limit",
        "exact numbers over mu and length",
        f.alibi_bend,
        command="python recipes/experiments alibi",
    ),
    Claim(
        "D4",
        "mu and tau are worth learning",
        "language models of bytes, three seeds; control: ALiBi with slopes learned",
        of(
            f.length_gain,
            "HyPE learned, from max_length 128",
            ("HyPE fixed, max_length 128", "ALiBi, learned slopes"),
            2048,
        ),
        command=LENGTH,
    ),
    exact(
        "D5",
        "a form for both directions (ours: cosh)",
        "forty digits",
        "tests/mechanisms/hype/test_hype.py",
    ),
    Claim(
        "D6",
        "first experiment: mu = 0.01, tau = 1",
        "exact numbers over mu and length",
        f.alibi_bend,
        command="python recipes/experiments alibi",
    ),
    exact(
        "D7",
        "first experiment: the gradient of tau",
        "finite differences",
        "tests/mechanisms/hype/test_hype_gradients.py",
    ),
    Claim(
        "D8",
        "less memory and time than a dense ALiBi mask",
        "CPU, three lengths, three dtypes",
        "no pair memory; faster than a mask from 2,048 tokens; docs/results/experiments.md",
        HOLDS,
        "python recipes/experiments flash",
    ),
    Claim(
        "D9",
        "the error from 10 to 2,048 tokens",
        "exact numbers over mu and length",
        f.alibi_bend,
        command="python recipes/experiments alibi",
    ),
    missing(
        "D10",
        "with FlashAttention-2",
        "columns ran in torch's CPU kernel; " + GPU,
        "python recipes/experiments flash",
    ),
    Claim(
        "D11",
        "trained at 128 tokens it holds at 2,048, as ALiBi does",
        "language models of bytes, three seeds, fixed mu",
        of(f.length_same, "HyPE fixed, max_length 2048", "ALiBi"),
        command=LENGTH,
    ),
    exact(
        "D12",
        "overflows if mu is large",
        "extreme heads",
        "tests/mechanisms/hype/test_hype.py",
        "finite",
    ),
    Claim(
        "D13",
        "mu = 1/L is better than a smaller one",
        "the same, mu 1/128 against 1/2048",
        of(f.length_gain, "HyPE fixed, max_length 128", ("HyPE fixed, max_length 2048",), 2048),
        command=LENGTH,
    ),
    Claim(
        "D14",
        "added to a pretrained model with rotary positions",
        LORA,
        of(f.adapted, "hype"),
        command=ADAPTATION,
    ),
    # --- E
    Claim(
        "E1",
        "concatenation of heads is wasteful",
        "a tenth of SmolLM2's heads dropped, by beta and by rivals",
        of(f.pruning_cost, 0.1),
        command=PRUNING,
    ),
    Claim(
        "E1a",
        "weights of heads tell better than chance which ones matter",
        "SmolLM2's heads dropped by beta and at random, three seeds",
        of(f.pruning_gain, "random"),
        command=PRUNING,
    ),
    Claim(
        "E1b",
        "and better than rankings without such weights",
        "SmolLM2's heads dropped by beta, gradient or contribution, three seeds",
        lambda: f.both(
            of(f.pruning_gain, "gradient"), of(f.pruning_gain, "contribution, by layer")
        ),
        command=PRUNING,
    ),
    exact(
        "E2",
        "attention over heads",
        "against the formula",
        "tests/mechanisms/head_fusion/test_head_fusion.py",
    ),
    Claim(
        "E3",
        "weights that depend on the input beat one learned number a head",
        "SmolLM2, frozen, three seeds",
        f.fusion_gain,
        command=PRUNING,
    ),
    Claim(
        "E4",
        "an entropy penalty prevents collapse",
        "SmolLM2, frozen, three seeds; two strengths and none",
        of(f.entropy_effect, ("input-dependent, entropy x 0.01", "input-dependent, entropy x 0.1")),
        command=PRUNING,
    ),
    Claim(
        "E5",
        "its time",
        "SmolLM2 on a CPU",
        "a few percent of a forward pass; docs/results/head_fusion.md",
        HOLDS,
        "python benchmarks/head_fusion.py",
    ),
    exact(
        "E6",
        "collaborative heads",
        "full rank is the heads' own attention",
        "tests/mechanisms/collaborative/test_collaborative.py",
    ),
    Claim(
        "E7",
        "as accurate with fewer parameters",
        "MiniLM at half rank, without the paper's training afterwards",
        of(f.collaborative, "logits, rank 192"),
        command="python recipes/experiments collaborative",
    ),
    exact(
        "E8",
        "talking heads",
        "against the paper's formula",
        "tests/mechanisms/talking_heads/test_talking_heads.py",
    ),
    Claim(
        "E9",
        "talking heads lower perplexity",
        LORA,
        of(f.adapted, "talking_heads"),
        command=ADAPTATION,
    ),
    exact(
        "E10",
        "all of HAT's layouts",
        "against its table",
        "tests/mechanisms/hat/test_hat.py",
        "made as published",
    ),
    Claim(
        "E11",
        "HAT is better on long documents",
        "long reviews, three seeds; against the first 512 tokens",
        of(f.hat_pairs, "cut off at 512"),
        command=HAT,
    ),
    Claim(
        "E11a",
        "what cross-segment attention adds to that",
        "the same segments without it, trained alike",
        of(f.hat_pairs, "segments alone"),
        command=HAT,
    ),
    exact(
        "E12",
        "a learned mixture of kernels",
        "against the formula",
        "tests/mechanisms/mkl/test_mkl.py",
    ),
    exact(
        "E13",
        "the same with weights by token",
        "against the formula",
        "tests/mechanisms/mkl/test_mkl.py",
    ),
    Claim(
        "E14",
        "weights by token beat one weight a head",
        "byte language models, five seeds; kernels of nouns, ten draws",
        lambda: f.both(f.token_weights, f.kernels_by_token, of(f.kernels_by_token, "projected: ")),
        command="python recipes/experiments token_weights",
    ),
    exact(
        "E15",
        "logits of three tokens",
        "against the formula",
        "tests/mechanisms/trilinear/test_trilinear.py",
    ),
    exact(
        "E16",
        "values of two tokens",
        "against the formula",
        "tests/mechanisms/trilinear/test_trilinear.py",
    ),
    exact(
        "E17",
        "BiDAF's form",
        "against the formula",
        "tests/mechanisms/trilinear/test_trilinear_models.py",
    ),
    Claim(
        "E18",
        "co-attention of question, context and answer",
        "noun question task, five seeds; pairwise attention with equal parameters",
        f.coattention,
        command="python recipes/experiments coattention",
    ),
    missing("E19", "questions over several documents", HUB),
    Claim(
        "E20",
        "cubic time needs windows or low rank",
        "forward and backward on a CPU",
        "windows make it linear in the length; docs/results/trilinear.md",
        HOLDS,
        "python benchmarks/trilinear.py",
    ),
    Claim(
        "E21",
        "three-way attention learns what pairwise does not",
        "a sum of three tokens, one layer, three seeds",
        lambda: f.both(
            of(f.match3, "pairwise"),
            of(f.match3, "pairwise, wider"),
            of(f.match3, "pairwise, two layers"),
        ),
        command="python recipes/experiments trilinear",
    ),
    Claim(
        "E22",
        "a learned kernel aligns with the task",
        "mixture of seven MiniLM kernels for noun classes, ten draws",
        lambda: f.both(f.kernel_alignment, of(f.kernel_alignment, "projected: ")),
        command="python recipes/experiments kernels",
    ),
    # --- K
    exact(
        "K1",
        "by name",
        "every mechanism that has one",
        "tests/integration/attention/test_names.py",
        "works",
    ),
    exact(
        "K2",
        "patched in place, and back",
        "bitwise",
        "tests/integration/patching/test_reversal.py",
        "works",
    ),
    exact(
        "K3",
        "cone, HyPE, head fusion and others together",
        "compositions",
        "tests/integration/patching/test_composition.py",
        "works",
    ),
    Claim(
        "K4",
        "a hierarchy without training",
        "SmolLM2 and MiniLM",
        "see C8 and C9",
        PARTLY,
        "hyperattn inject --help",
    ),
    Claim(
        "K5",
        "recipes",
        "four kinds of models, each applicable mechanism and a control",
        "two steps each; conversions (HAT, collaborative heads) have none",
        HOLDS,
        "python recipes/finetune.py --settings",
    ),
    exact(
        "K6",
        "PEFT",
        "twelve kinds of adapters",
        "tests/integration/adapters/test_adapters.py",
        "works, or raises a one-line error",
    ),
    exact(
        "K7", "datasets, evaluate", "a recipe with both", "tests/recipes/test_finetune.py", "works"
    ),
    exact(
        "K8",
        "configs and cards for the Hub",
        "three examples",
        "tests/recipes/test_published.py",
        "works; none is uploaded",
    ),
    missing("K9", "GPU kernels", "no committed result; docs/gpu.md has the status"),
)
