"""The contracts of all mechanisms, in settings under which everything is at work in rows of eleven tokens."""

import pytest

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import Exact, Pages, Window
from hf_hyperattn.registry import MECHANISMS
from hf_hyperattn.testing import mechanism_checks
from tests.covering import choose_covering

CONFIGS = {
    "cone": [ha.ConeConfig(), ha.ConeConfig(variant="penumbral", squared=False)],
    "hyperbolic": [
        ha.HyperbolicConfig(),
        ha.HyperbolicConfig(distance="squared_lorentz", aggregation="mean"),
    ],
    "hype": [ha.HypeConfig(max_length=32)],
    "hsa": [ha.HsaConfig(windows=(2, 4), near=2, sinks=1, refine_top_k=1)],
    "head_fusion": [ha.HeadFusionConfig()],
    "talking_heads": [ha.TalkingHeadsConfig()],
    "collaborative": [ha.CollaborativeConfig()],
    "mkl": [ha.MklConfig(), ha.MklConfig(kind="conditional")],
    "sparse": [
        ha.SparseConfig(
            [
                Pages(2, 1, 2, 1, query="previous", chunk=2),
                Window(3, 1),
                Pages(2, 1, 2, 1),
                Pages(2, 1, 2, 1, "mean", "first", 3),
            ]
        ),
        ha.SparseConfig(
            [Window(2, 1), Exact(), Pages(2, 1, 2, 1), Pages(1, 0, 1, 2, "mean", "first", 3)]
        ),
    ],
    "trilinear": [ha.TrilinearConfig(windows=(4, 3)), ha.TrilinearConfig(form="bidaf")],
}
#: What is refused, by the check's name; every other refusal fails.
REFUSES = {
    "hype": {
        "by_name-.*-t5": "max_length=None means the model's max_position_embeddings, and .* has None"
    },
    "hsa": {
        ".*-gemma2": "logits have a softcap",
        # in models without causal layers the tree has nothing to learn beside the gate
        "(learning|gradients|compiled|checkpointing|adapter)-.*-replace-(bert|vit)": "nothing is added that learns",
    },
    "sparse": {
        "(learning|gradients|compiled|checkpointing|adapter)-.*-replace-.*": "nothing is added that learns",
        ".*'previous'.*-(bert|vit|bart|t5)": "see the tokens after them too",
    },
    # w1 weighs queries alone, which no softmax over keys sees; the paper has it
    "trilinear": {r"learning-trilinear\(form=bidaf.*": r"three steps: (\S+\.w1(, )?)+$"},
    "collaborative": {".*-(llama|mistral|gemma2|gpt_oss)": "turned by rotary positions"},
}
CHECKS = [
    check
    for name, configs in CONFIGS.items()
    for check in mechanism_checks(name, *configs, refuses=REFUSES.get(name))
]
#: Contracts that depend most on the family. The slow tests try every config of them in every family.
BY_FAMILY = ("identity", "cached", "padding", "reload", "by_name")


def read_values(check) -> tuple:
    """Return the values of a check that must meet in pairs."""
    return check.contract, str(check.config), check.mode, check.family


def read_setting(check) -> tuple:
    """Return the values that must meet in triples, with the mode left out."""
    return check.contract, str(check.config), check.family


def split_checks() -> tuple[list, list]:
    """Return the checks of every run, and those of the slow tests.

    Every contract meets every config, family and mode, and every config meets every family, in a check that is not
    refused. Refusals are covered by themselves. Compiling takes seconds: one check is quick, the others are slow.
    """
    held = [check for check in CHECKS if not check.refusal]
    refused = [check for check in CHECKS if check.refusal]
    compiled = [check for check in held if check.contract == "compiled"]
    plain = [check for check in held if check.contract != "compiled"]
    quick = choose_covering(plain, read_values) + choose_covering(refused, read_values)
    by_family = [check for check in plain if check.contract in BY_FAMILY]
    slow = choose_covering(by_family, read_setting, strength=3, covered=quick)
    first, *others = choose_covering(compiled, read_values, covered=quick)
    return [*quick, first], [*slow, *others]


QUICK, SLOW = split_checks()


def test_every_mechanism_is_here():
    assert set(CONFIGS) == set(MECHANISMS) - {"hat"}  # a conversion


@pytest.mark.parametrize(
    "check",
    [*QUICK, *(pytest.param(check, marks=pytest.mark.slow) for check in SLOW)],
    ids=str,
)
def test_contract(check):
    check()
