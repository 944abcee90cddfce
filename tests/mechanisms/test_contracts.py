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
#: Slow ones run here for one setting of each mechanism.
SLOW = [c for c in CHECKS if c.contract in ("compiled", "composition") and (c.mode, c.family) != ("blend", "llama")]


def test_every_mechanism_is_here():
    assert set(CONFIGS) == set(MECHANISMS) - {"hat"}  # a conversion


@pytest.mark.parametrize(
    "check", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CHECKS], ids=str
)
def test_contract(check):
    check()
