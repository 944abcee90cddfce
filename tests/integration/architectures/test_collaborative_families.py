"""Every family that can be converted uses its projections as they are: shared dimensions in any order do the same.

Each host loses one dimension a head, with its bias kept. The decomposition at the rank that is left is exact, and
orders dimensions by size, across heads: a host that did anything to a head's queries or keys, or read them twice, would
differ.
"""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.config import HyperAttnConfig
from hf_hyperattn.integration import convert
from hf_hyperattn.integration.architectures.collaborative.conversion import SHAREABLE
from hf_hyperattn.integration.architectures.collaborative.projections import find_projections
from hf_hyperattn.integration.attention.hyper import patched_hosts
from hf_hyperattn.integration.patching.attach import all_hosts
from hf_hyperattn.integration.patching.patch import route_families
from tests.integration.architectures.collaborative import quiet
from tests.zoo.compare import gap, run
from tests.zoo.tiny import tiny

#: Parts that are built as a part of another model.
INSIDE = {"blip_text_model": "blip", "siglip_text_model": "siglip"}


def narrowed(model, model_type: str) -> dict[str, tuple]:
    """Noise on all biases, one dimension less in every head of the family's hosts; a config of its own for each."""
    generator, own = torch.Generator().manual_seed(3), {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        for _, module, host in all_hosts(model):
            if module.config.model_type == model_type:
                found = find_projections(module)
                found.query.view(host.heads, host.head_dim, -1)[:, -1] = 0
                rank = host.heads * (host.head_dim - 1)
                own[host.name] = (ha.CollaborativeConfig(rank=rank),)
    return own


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(SHAREABLE))
def test_queries_and_keys_are_used_as_they_come(model_type):
    made, _ = tiny("base", INSIDE.get(model_type, model_type))
    route_families(made.model)
    own = narrowed(made.model, model_type)
    before = run(made.model, made.inputs)
    config = HyperAttnConfig(
        (ha.CollaborativeConfig(rank=1),),
        layers=lambda host: host.name in own,
        mode="replace",
        include_cross_attention=True,
        overrides=own,
    )
    with quiet():
        convert(made.model, config)
    assert len(list(patched_hosts(made.model))) == len(own) > 0
    assert gap(before, run(made.model, made.inputs)) <= 1e-5
    with torch.no_grad():
        for _, host in patched_hosts(made.model):
            host.hyper.collaborative.mixing.add_(1.0)
    assert gap(before, run(made.model, made.inputs)) > 1e-6  # it was used at all
