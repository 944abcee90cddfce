"""The contracts of all mechanisms, in settings under which everything is at work in rows of eleven tokens."""

import pytest

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import Exact, Pages, Window
from hf_hyperattn.registry import MECHANISMS
from hf_hyperattn.testing import mechanism_checks

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
#: What differs by family is tried in all of them at once.
BY_FAMILY = ("identity", "cached", "padding")
#: Stages that take the same way in either mode.
MODELESS = ("mixing", "fusion")


def is_quick(check) -> bool:
    """Whether every run does it; the rest, and what takes long, is with the slow tests."""
    if check.contract in ("cached", "padding") and check.family == "llama":
        return False  # tests/test_masks_and_calls.py draws these
    is_first = (check.mode, check.config) == ("blend", CONFIGS[check.config.mechanism][0])
    if check.contract == "compiled":
        return is_first and check.family == "llama" and check.config.mechanism == "cone"
    if check.contract in ("composition", "engines"):
        return is_first and check.family == "llama"
    if (
        check.config.mechanism == "sparse"
    ):  # blended, it is what it is in place of the host's attention, and a gate
        return check.family in ("llama", "bert") and check.mode == "replace" and not check.refusal
    if check.contract in BY_FAMILY and check.mode == "blend":
        return True
    again = check.mode == "replace" and MECHANISMS[check.config.mechanism].stage in MODELESS
    if check.contract == "adapter":
        return is_first
    return check.family in ("llama", "bert") and (
        not again or check.contract in ("identity", "reversal", "reload")
    )


def test_every_mechanism_is_here():
    assert set(CONFIGS) == set(MECHANISMS) - {"hat"}  # a conversion


@pytest.mark.parametrize(
    "check",
    [c if is_quick(c) else pytest.param(c, marks=pytest.mark.slow) for c in CHECKS],
    ids=str,
)
def test_contract(check):
    check()
