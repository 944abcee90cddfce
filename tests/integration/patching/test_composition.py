"""Every pair of mechanisms in one config: one checkpoint that starts as the model it was, or a refusal that names both.

What a pair computes is tested in the rooms; here it is that it works as one: identity at the start, the order in which
it was written does not matter, exact reload, exact reversal, the same with a cache, the same by the specification.
"""

from itertools import combinations

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import Pages
from tests.covering import choose_covering
from tests.integration.attention.test_families import generate
from tests.integration.models import FAMILIES, State, difference, perturb, run

#: One or more configs of every mechanism that can be patched in.
CONFIGS = {
    "cone": ha.ConeConfig(),
    "hyperbolic": ha.HyperbolicConfig(aggregation="mean"),
    "hyperbolic, midpoint": ha.HyperbolicConfig(distance="squared_lorentz"),
    "hype": ha.HypeConfig(max_length=32),
    "hsa": ha.HsaConfig(windows=(2, 4)),
    "sparse": ha.SparseConfig([Pages(2, 1, 2, 1)]),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "mkl": ha.MklConfig(kind="global"),
    "mkl, conditional": ha.MklConfig(kind="conditional"),
    "trilinear": ha.TrilinearConfig(windows=(4, 3)),
    "trilinear, bidaf": ha.TrilinearConfig(form="bidaf"),
    "collaborative": ha.CollaborativeConfig(),
}
#: Causal with rotary positions, causal without, bidirectional.
HOSTS = ("llama", "gpt2", "bert")
PAIRS = [p for p in combinations(CONFIGS, 2) if CONFIGS[p[0]].mechanism != CONFIGS[p[1]].mechanism]


def allowed(names, family: str) -> bool:
    """Whether the pair has a meaning in that host, by what the configs declare."""
    a, b = (CONFIGS[name] for name in names)
    if family == "llama" and "collaborative" in (a.mechanism, b.mechanism):
        return False  # rotary positions
    refused = a.clash(b) or b.clash(a)
    return not refused and not set(a.stages) & set(b.stages)


def patched(family: str, names, mode: str = "blend"):
    model, inputs = (make() for make in FAMILIES[family])
    return ha.patch_model(model, *(CONFIGS[name] for name in names), mode=mode), inputs


KNOWN = [(family, pair) for family in HOSTS for pair in PAIRS]
MEANT = [(family, pair) for family, pair in KNOWN if allowed(pair, family)]
CLASHING = [(family, pair) for family, pair in KNOWN if not allowed(pair, family)]
label = lambda value: value if isinstance(value, str) else " + ".join(value)


def some(cases):
    """Cases in which every pair of mechanisms meets, and every mechanism every family."""
    chosen = choose_covering(cases, lambda case: (case[0], *case[1]))
    return pytest.mark.parametrize("family, pair", chosen, ids=label)


def test_every_mechanism_is_here():
    conversions = {"hat"}
    assert {config.mechanism for config in CONFIGS.values()} | conversions == set(
        ha.registry.MECHANISMS
    )
    assert len(MEANT) > 100


@pytest.mark.parametrize("family, pair", CLASHING, ids=label)
def test_a_pair_without_meaning_is_refused_and_named(family, pair):
    model, _ = (make() for make in FAMILIES[family])
    before = State(model)
    with pytest.raises(ValueError) as caught:
        ha.patch_model(model, *(CONFIGS[name] for name in pair))
    text = str(caught.value)
    assert "\n" not in text and "allowed" in text
    if family != "llama" or "collaborative" not in pair:
        assert all(CONFIGS[name].mechanism in text for name in pair)
    assert not State(model).differences(before)


@some(MEANT)
def test_a_pair_is_one_patch(family, pair, tmp_path):
    stock, inputs = (make() for make in FAMILIES[family])
    start = run(stock, inputs)
    stock.save_pretrained(tmp_path)  # which writes into the config, whatever the model
    before = State(stock)
    model = ha.patch_model(stock, *(CONFIGS[name] for name in pair))
    assert difference(run(model, inputs), start) <= 1e-5
    perturb(model, 0.2)
    moved = run(model, inputs)
    assert all(torch.isfinite(t).all() for t in moved.values()) and difference(moved, start) > 1e-5

    model.save_pretrained(tmp_path)
    auto = AutoModel if family == "bert" else AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path).eval()
    assert difference(run(again, inputs), moved) == 0
    assert [m["mechanism"] for m in again.config.hyperattn["mechanisms"]] == [
        m["mechanism"] for m in model.config.hyperattn["mechanisms"]
    ]
    ha.unpatch_model(model)
    assert not State(model).differences(before) and difference(run(model, inputs), start) == 0


@some([m for m in MEANT if m[0] != "bert"])
def test_a_pair_generates_the_same_with_a_cache(family, pair):
    model, inputs = patched(family, pair)
    perturb(model, 0.2)
    assert torch.equal(
        generate(model, inputs, use_cache=True), generate(model, inputs, use_cache=False)
    )


@some(MEANT)
def test_a_pair_in_tiles_agrees_with_the_specification(family, pair):
    model, inputs = patched(family, pair)
    perturb(model, 0.2)

    def by(backend):
        """What the model computes by a named engine: `auto` would not cut so few tokens into tiles."""
        ha.set_backend(model, backend)
        return run(model, inputs)

    found = by("blockwise")
    model.double()
    assert difference(by("reference"), found) < 2e-4


@pytest.mark.parametrize("family, pair", MEANT[::3], ids=label)
def test_the_order_of_writing_does_not_matter(family, pair):
    results = []
    for names in (pair, pair[::-1]):
        torch.manual_seed(0)
        model, inputs = patched(family, names)
        perturb(model, 0.2)
        results.append(run(model, inputs))
    assert difference(*results) == 0
