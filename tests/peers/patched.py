"""A pytest plugin: while HYPERATTN_PEERS names a mechanism, every model that is built is patched, with moved gates."""

from __future__ import annotations

import functools
import hashlib
import os

import torch
from transformers import PreTrainedModel

import hf_hyperattn as ha

MECHANISM = os.environ.get("HYPERATTN_PEERS", "stock")
CONFIGS = {
    "cone": ha.ConeConfig(),
    "hyperbolic": ha.HyperbolicConfig(),
    "hype": ha.HypeConfig(max_length=512),
    "hsa": ha.HsaConfig(windows=(4,), tying=None),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "mkl": ha.MklConfig(),
    "trilinear": ha.TrilinearConfig(windows=(16, 8)),
    "collaborative": ha.CollaborativeConfig(),
}


def move(model: torch.nn.Module) -> None:
    """Move every added parameter away from where it starts, each by what its name says, so that copies are equal."""
    for name, parameter in model.named_parameters():
        if ".hyper." in f".{name}" and parameter.device.type != "meta":
            seed = int.from_bytes(
                hashlib.sha256(name.split("hyper.")[-1].encode()).digest()[:4], "big"
            )
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data += 0.3 * noise.to(parameter)


def patch_all() -> None:
    """Let every model patch itself at the end of its outermost `__init__`; models of checkpoints are as they were."""
    depth = [0]
    for cls in (PreTrainedModel, *all_classes(PreTrainedModel)):
        if "__init__" in vars(cls):
            cls.__init__ = around(cls.__init__, depth)


def all_classes(cls: type) -> list[type]:
    found = list(cls.__subclasses__())
    for below in found:
        found += below.__subclasses__()
    return found


def around(init, depth: list[int]):
    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        depth[0] += 1
        try:
            init(self, *args, **kwargs)
        finally:
            depth[0] -= 1
        if depth[0] == 0 and any(p.device.type != "meta" for p in self.parameters()):
            with torch.no_grad():
                if getattr(self.config, "hyperattn", None) is None:
                    ha.patch_model(self, CONFIGS[MECHANISM])
                move(self)

    return __init__
