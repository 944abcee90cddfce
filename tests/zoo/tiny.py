"""A tiny random model of any model type, with inputs it runs on."""

import dataclasses

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from tests.zoo import inputs as I
from tests.zoo.compare import finite, run
from tests.zoo.shrink import kwargs_of
from tests.zoo.special import INPUTS

KINDS = {
    "base": (AutoModel, MODEL_MAPPING_NAMES),
    "causal": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
}


@dataclasses.dataclass
class Tiny:
    config: object
    model: torch.nn.Module
    inputs: dict


class CannotBuild(Exception):
    """The type cannot be built here; the message is the reason."""


def types(kind):
    return list(KINDS[kind][1])


def tiny_config(model_type):
    """The tiny config of a model type."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**kwargs_of(config_class, model_type))


def build(kind, model_type, **keywords):
    """The config and the model, seeded; keywords go to `from_config`."""
    config = tiny_config(model_type)
    torch.manual_seed(0)
    return config, ruffle(KINDS[kind][0].from_config(config, **keywords).eval())


def ruffle(model):
    """Noise on every tensor that starts out constant: zero gates, layer scales and codebooks would hide attention."""
    generator = torch.Generator().manual_seed(0)
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.dim() > 1)]
    with torch.no_grad():
        for tensor in tensors:
            if (
                tensor.is_floating_point()
                and tensor.numel() > 1
                and bool((tensor == tensor.flatten()[0]).all())
            ):
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    return model


def tiny(kind, model_type):
    """The model, with the first inputs it runs on, and what comes out."""
    config, model = build(kind, model_type)
    make, errors = INPUTS.get(config.model_type), []
    for inputs in [make(config)] if make else I.attempts(model, config):
        try:
            out = run(model, inputs)
        except Exception as error:
            errors.append((list(inputs), error))
            continue
        if finite(out):
            return Tiny(config, model, inputs), out
        errors.append((list(inputs), ValueError("the outputs are not finite")))
    failure = CannotBuild(reason(errors))
    failure.errors = errors
    raise failure


def reason(errors):
    """Why no inputs worked, in one line: the error of the first attempt."""
    if not errors:
        return "its forward takes no tensors that can be made up from the config"
    names, error = errors[0]
    message = (str(error).splitlines() or [""])[0]
    return f"forward({', '.join(names)}) fails: {type(error).__name__}: {message}"
