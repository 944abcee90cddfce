"""The contracts of all mechanisms, in settings under which everything is at work in rows of eleven tokens."""

import pytest

import hf_hyperattn as ha
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
    "trilinear": [ha.TrilinearConfig(windows=(4, 3)), ha.TrilinearConfig(form="bidaf")],
}
CHECKS = [check for name, configs in CONFIGS.items() for check in mechanism_checks(name, *configs)]
#: What differs by family is tried in all of them at once; the rest of them, and what takes long, with the slow tests.
BY_FAMILY = ("identity", "cached", "padding")
FAST = [
    c
    for c in CHECKS
    if (c.family in ("llama", "bert") and c.contract not in ("compiled", "composition"))
    or (c.contract in BY_FAMILY and c.mode == "blend")
    or (
        (c.mode, c.family, c.config) == ("blend", "llama", CONFIGS[c.config.mechanism][0])
        and (c.contract != "compiled" or c.config.mechanism in ("cone", "mkl"))
    )
]


def test_every_mechanism_is_here():
    assert set(CONFIGS) == set(MECHANISMS) - {"hat"}  # a conversion


@pytest.mark.parametrize(
    "check", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CHECKS], ids=str
)
def test_contract(check):
    check()
