"""Tiny models with HSA in which a wrong block shows, and how they are fed through a cache."""

import pytest
import torch
import transformers as hf

from hf_hyperattn import HierarchicalCache, HsaConfig, patch_model
from hf_hyperattn.mechanisms.base import Host
from tests.integration.attention.test_families import logits, model_of

SIZES = (2, 4, 16)
SOME = HsaConfig(SIZES, near=(3, 0, 5, 1), sinks=(1, 2, 0, 1), refine_top_k=(0, 1, 2, 1))
CAUSAL = ("llama", "gpt2", "mistral", "qwen3", "gpt_oss")
CACHED = ("llama", "gpt2", "mistral", "qwen3")
ENCODERS = ("bert", "distilbert")
every_causal = pytest.mark.parametrize("family", CAUSAL)
every_cached = pytest.mark.parametrize("family", CACHED)


def patched(family, config=SOME, mode="replace", sharp=3.0, **changes):
    """A tiny model in which a wrong block changes every logit."""
    model = model_of(family, "eager" if family == "gpt_oss" else "sdpa", **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharp)
    return patch_model(model, config, mode=mode)


def ids_of(model, length=41, rows=2):
    torch.manual_seed(2)
    return torch.randint(5, 90, (rows, length))


def padded(ids, pads):
    """Row 1 without its first tokens, padded at its left: ids, mask, positions."""
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
    }


def host(causal, heads=4):
    return Host("layer", heads, 2, causal, False, 0)


def caches(model):
    return {
        "dynamic": hf.DynamicCache(config=model.config),
        "static": hf.StaticCache(config=model.config, max_cache_len=64),
        "hierarchical": HierarchicalCache(model),
        "whole": hf.DynamicCache(),  # also where a window slides: the mask alone hides then
    }


def stepwise(model, inputs, cache, parts=(0, 17, 24)):
    """Logits in chunks, then token by token."""
    length = inputs["input_ids"].shape[1]
    edges = [*parts, *range(parts[-1] + 1, length + 1)]
    found = []
    for start, stop in zip(edges, edges[1:]):
        mask = (
            {"attention_mask": inputs["attention_mask"][:, :stop]}
            if "attention_mask" in inputs
            else {}
        )
        positions = {"position_ids": inputs["position_ids"][:, start:stop]} if mask else {}
        ids = inputs["input_ids"][:, start:stop]
        found.append(logits(model, input_ids=ids, **mask, **positions, past_key_values=cache))
    return torch.cat(found, 1)
