"""What head_fusion and talking_heads must both do in a model; the tests of either call these with its config."""

from __future__ import annotations

import torch

import hf_hyperattn as ha
from tests.integration.models import State, difference, perturb, real, run, tensors

#: Those that the contract names come first.
NAMED = ("llama", "gpt2", "bert", "vit", "bart", "mistral", "qwen3")
GENERATORS = ("llama", "gpt2", "mistral", "gemma2", "gpt_oss", "qwen3", "bart", "t5", "whisper")


def real_checkpoint(model, inputs: dict, config, directory) -> None:
    """A pretrained model: identity, also where it is computed; exact reload; the original to the last bit."""
    model.save_pretrained(directory / "plain")
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, config)
    assert difference(before, run(model, inputs)) <= 1e-5
    assert difference(before, real(tensors(model(**inputs)), inputs)) <= 1e-5
    layers = [m for m in model.modules() if hasattr(m, "idle")]
    for layer in layers:
        layer.idle = lambda: False
    assert difference(before, run(model, inputs)) <= 2e-6 * max(t.abs().max() for t in before.values()) + 1e-5
    for layer in layers:
        del layer.idle
    perturb(model, 0.02)
    expected = run(model, inputs)
    assert difference(before, expected) > 1e-3
    model.save_pretrained(directory / "patched")
    again = type(model).from_pretrained(directory / "patched", dtype=torch.float32)
    assert difference(expected, run(again, inputs)) == 0
    ha.unpatch_model(model)
    assert state.differences(State(model)) == [] and difference(before, run(model, inputs)) == 0


def real_generation(model, inputs: dict, config) -> None:
    """Greedy generation of a pretrained model, with and without a cache, alone and padded."""
    ha.patch_model(model, config)
    perturb(model, 0.02)
    alone = {k: v[1:, v.shape[1] - int(inputs["attention_mask"][1].sum()) :] for k, v in inputs.items()}
    how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = model.generate(**alone, use_cache=False, **how)
    assert torch.equal(model.generate(**alone, **how), expected)
    padded = {k: torch.cat([torch.zeros_like(v[:, :5]), v], 1) for k, v in alone.items()}
    assert torch.equal(model.generate(**padded, **how)[:, 5:], expected)
