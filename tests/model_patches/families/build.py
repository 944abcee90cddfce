"""How tiny models of the served families are made, and the inputs they take.

Weights are drawn wider than the families' own initialisation, so that attention is far from uniform and an error in
scaling, bias or mask shows.
"""

import pytest
import torch
import transformers

from model_patches import FAMILIES, census

TINY = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = TINY | {"intermediate_size": 37, "max_position_embeddings": 64}
PIXELS = {"image_size": 32, "patch_size": 8, "num_channels": 3}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
} | PIXELS


def build(architecture, config, **options):
    """A model of float32 in evaluation mode, the same on every call."""
    torch.manual_seed(0)
    configuration = config(**options) if isinstance(config, type) else config
    model = architecture(configuration).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(
                    0, 0.6 * parameter[0].numel() ** -0.5 if "embed" not in name else 0.5
                )
            else:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def make(architecture, config, **options):
    """As `build`, by the names Transformers exports; skips the test if this Transformers needs no route for them."""
    config = getattr(transformers, config)
    if config.model_type in FAMILIES and census.state(config.model_type) == "routed":
        pytest.skip(
            f"{config.model_type} calls the interface itself in Transformers {transformers.__version__}"
        )
    return build(getattr(transformers, architecture), config, **options)


def ids(batch=2, length=11):
    return {"input_ids": torch.arange(batch * length).reshape(batch, length) * 7 % 55 + 4}


def padded(side, batch=2, length=11):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, slice(0, 4) if side == "left" else slice(7, length)] = 0
    return ids(batch, length) | {"attention_mask": mask}


def pixels(size=32, batch=2):
    return {
        "pixel_values": torch.linspace(-1, 1, batch * 3 * size * size)
        .reshape(batch, 3, size, size)
        .sin()
    }


def boxes(batch=2, length=11):
    corners = torch.arange(batch * length * 4).reshape(batch, length, 4) * 13 % 40
    corners[..., 2:] += 41
    return {"bbox": corners}
