"""`generate` over caches that keep keys and values in few bits: what the mechanism makes of the keys that come back."""

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, cache_utils

import hf_hyperattn as ha
from tests.integration.attention.test_continuous_batching import steep

CONFIGS = {
    "cone": ha.ConeConfig(),
    "hyperbolic": ha.HyperbolicConfig(),
    "hype": ha.HypeConfig(),
    "hsa": ha.HsaConfig(windows=(4,)),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "mkl": ha.MklConfig(),
    "trilinear": ha.TrilinearConfig(windows=(8, 4)),
}
#: Backend -> its module, and options that quantise what is there, again and again, within few tokens.
SMALL = dict(nbits=4, q_group_size=8, residual_length=4)
BACKENDS = {
    "fp8": (None, {}),
    "quanto": ("optimum.quanto", SMALL),
    "hqq": ("hqq", SMALL | dict(axis_key=1, axis_value=1)),
}
PROMPTS = torch.tensor([[7, 8, 9, 10, 11, 12, 13], [0, 0, 0, 31, 32, 33, 34]])
MASK = (PROMPTS != 0).long()
INSTALLED = [pytest.param(name, marks=pytest.mark.tools) for name in ("quanto", "hqq")]
backends = pytest.mark.parametrize("backend", ["fp8", *INSTALLED])


def patched(name: str, moved: bool = True):
    model = ha.patch_model(steep(), CONFIGS[name])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if moved and ".hyper." in parameter_name:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def write(model, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [B, 10] and their logits [B, 10, V]."""
    found = model.generate(
        PROMPTS,
        attention_mask=MASK,
        max_new_tokens=10,
        min_new_tokens=10,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )
    return found.sequences[:, PROMPTS.shape[1] :], torch.stack(found.logits, 1)


def quantised(backend: str) -> dict:
    """Arguments of `generate`."""
    module, options = BACKENDS[backend]
    if module is not None:
        pytest.importorskip(module)
    elif not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this Transformers quantises no cache by itself")
    return dict(cache_implementation="quantized", cache_config=dict(backend=backend, **options))


class Rounded(DynamicCache):
    """Keys and values in full width, with the numbers that 8-bit floating point leaves: scales of the first call."""

    def __init__(self):
        super().__init__()
        self.scales: dict = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        first = layer_idx not in self.scales
        if first:
            self.scales[layer_idx] = [t.abs().max() / 448 for t in (key_states, value_states)]
        rounded = [
            (t / scale).to(torch.float8_e4m3fn).float() * scale
            for t, scale in zip((key_states, value_states), self.scales[layer_idx])
        ]
        return_value = super().update(*rounded, layer_idx, *args, **kwargs)
        return (key_states, value_states) if first else return_value


@pytest.mark.parametrize("name", CONFIGS)
def test_eight_bits_are_keys_that_were_rounded(name):
    model = patched(name)
    tokens, scores = write(model, **quantised("fp8"))
    same_tokens, same_scores = write(model, past_key_values=Rounded())
    assert torch.equal(tokens, same_tokens) and (scores - same_scores).abs().max() <= 1e-4
    assert (scores[:, 1:] - write(model)[1][:, 1:]).abs().max() > 1e-3


@pytest.mark.parametrize("backend", INSTALLED)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_engine_reads_the_same_keys(name, backend):
    options = quantised(backend)
    model = patched(name)
    tokens, scores = write(model, **options)
    ha.set_backend(model, "reference")
    same_tokens, same_scores = write(model, **options)
    assert torch.equal(tokens, same_tokens) and (scores - same_scores).abs().max() <= 1e-3
    assert (scores[:, 1:] - write(model)[1][:, 1:]).abs().max() > 1e-3


@backends
@pytest.mark.parametrize("name", CONFIGS)
def test_a_patch_that_starts_writes_what_stock_writes(name, backend):
    options = quantised(backend)
    stock, started = write(steep(), **options), write(patched(name, moved=False), **options)
    assert torch.equal(stock[0], started[0]) and (stock[1] - started[1]).abs().max() <= 1e-3


@backends
@pytest.mark.parametrize("name", ["cone", "hsa"])
def test_beams(name, backend):
    """Every beam reads its own keys."""
    options = quantised(backend) | dict(
        num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    model = patched(name)
    found = model.generate(PROMPTS[:1], attention_mask=MASK[:1], **options)
    ha.set_backend(model, "reference")
    assert torch.equal(found, model.generate(PROMPTS[:1], attention_mask=MASK[:1], **options))


@backends
def test_by_name(backend):
    options = quantised(backend)
    model = steep()
    stock = write(model, **options)[0]
    model.set_attn_implementation("cone")
    tokens = write(model, **options)[0]
    ha.set_backend(model, "reference")
    assert torch.equal(tokens, write(model, **options)[0]) and not torch.equal(tokens, stock)


def test_the_cache_is_the_one_that_was_asked_for():
    model = patched("hsa")
    found = model.generate(
        PROMPTS,
        attention_mask=MASK,
        max_new_tokens=2,
        return_dict_in_generate=True,
        pad_token_id=0,
        **quantised("fp8"),
    )
    assert isinstance(found.past_key_values, QuantizedCache)
