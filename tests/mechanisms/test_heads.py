"""heads=: every mechanism leaves the other heads alone, or patching refuses."""

import pytest
import torch
from torch import nn

import hf_hyperattn as ha
from hf_hyperattn.integration.stock import OURS
from hf_hyperattn.registry import MECHANISMS
from tests.integration import toy_rooms
from tests.integration.models import State, bert, llama, perturb, text_inputs

CONFIGS = {
    "cone": ha.ConeConfig(),
    "hyperbolic": ha.HyperbolicConfig(aggregation="mean"),
    "einstein": ha.HyperbolicConfig(),
    "hype": ha.HypeConfig(),
    "hsa": ha.HsaConfig(windows=(2, 4), near=1, sinks=0, refine_top_k=0),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "collaborative": ha.CollaborativeConfig(),
    "mkl": ha.MklConfig(),
    "conditional": ha.MklConfig(kind="conditional"),
    "trilinear": ha.TrilinearConfig(windows=None),
    "windowed": ha.TrilinearConfig(windows=(4, 2)),
    "bidaf": ha.TrilinearConfig(form="bidaf", windows=None),
}


def model_for(name: str) -> tuple[nn.Module, nn.Module]:
    """A model of one layer that the mechanism serves, and the layer's output projection."""
    torch.manual_seed(0)
    if name == "collaborative":
        model = bert(num_hidden_layers=1, initializer_range=0.3)
        return model, model.encoder.layer[0].attention.output.dense
    model = llama(num_hidden_layers=1, num_key_value_heads=4, initializer_range=0.3)
    return model, model.model.layers[0].self_attn.o_proj


def head_outputs(model: nn.Module, projection: nn.Module) -> torch.Tensor:
    """What every head hands to the output projection, [B, N, H, d]."""
    seen = []
    handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model(**text_inputs())
    handle.remove()
    return seen[0].unflatten(-1, (4, -1))[1]  # the row without padding


def test_every_mechanism_is_tried():
    missing = {n for n in MECHANISMS if n not in {c.mechanism for c in CONFIGS.values()}} - {"hat"}
    assert not missing  # hat is a conversion


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_other_heads_are_left_alone(name, mode):
    model, projection = model_for(name)
    before = head_outputs(model, projection)
    heads = [0, 2] if name in ("talking_heads", "mkl", "conditional", "head_fusion") else [2]
    ha.patch_model(model, CONFIGS[name], heads=heads, mode=mode)
    perturb(model, 0.5)
    after = head_outputs(model, projection)
    others = [h for h in range(4) if h not in heads]
    assert (after - before)[:, others].abs().max() <= 1e-5
    assert (after - before)[:, heads].abs().amax((0, 2)).min() > 1e-4


@pytest.fixture
def toys():
    known = set(MECHANISMS)
    toy_rooms.register_toys()
    yield
    for name in set(MECHANISMS) - known:
        del MECHANISMS[name]
        OURS.discard(name)


def test_a_layer_that_does_not_say_that_it_honours_heads_is_refused(toys, monkeypatch):
    model, projection = model_for("toy")
    before, state = head_outputs(model, projection), State(model)
    with pytest.raises(
        ValueError, match=r"toy_cosine changes all heads .* chooses 1 of 4; allowed: heads=None"
    ) as error:
        ha.patch_model(model, toy_rooms.ToyCosineConfig(), heads=[2])
    assert "\n" not in str(error.value) and state.differences(State(model)) == []
    ha.patch_model(model, toy_rooms.ToyCosineConfig(), heads=range(4))
    ha.unpatch_model(model)
    ha.patch_model(model, toy_rooms.ToySlopeConfig(slope=1.0), heads=[2])
    perturb(model)
    after = head_outputs(model, projection)
    changed = (after - before).abs().amax((0, 2))
    assert changed[[0, 1, 3]].max() <= 1e-5 and changed[2] > 1e-2
    ha.unpatch_model(model)
    original = toy_rooms.ToySlopeLayer.__init__
    monkeypatch.setattr(  # a layer that says so and forgets to pass them on
        toy_rooms.ToySlopeLayer,
        "__init__",
        lambda self, config, host, mode, heads: original(self, config, host, mode),
    )
    with pytest.raises(ValueError, match="toy_slope changes all heads"):
        ha.patch_model(model, toy_rooms.ToySlopeConfig(), heads=[2])
