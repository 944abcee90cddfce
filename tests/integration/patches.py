"""Tiny models of a family, patched, with what the tests of patching and of reload ask of them."""

from __future__ import annotations

import hf_hyperattn as ha
from tests.integration.models import FAMILIES, perturb, run

CONE = ha.ConeConfig(gamma=0.5, radius=2.0)
VARIANTS = {
    "umbral": ha.ConeConfig(),
    "penumbral": ha.ConeConfig(variant="penumbral", gamma=0.5, radius=2.0),
    "expmap": ha.ConeConfig(mapping="expmap"),
}


def make(family: str):
    """A model of the family and its inputs."""
    model, inputs = FAMILIES[family]
    return model(), inputs()


def patched(family: str, **options):
    """A patched model that has learned something, its inputs, and what it computes."""
    model, inputs = make(family)
    ha.patch_model(model, CONE, **options)
    perturb(model)
    return model, inputs, run(model, inputs)


def added(model) -> dict:
    """The added parameters by name."""
    return {n: p for n, p in model.named_parameters() if ".hyper." in n}
