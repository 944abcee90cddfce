"""Requests that share steps, prefixes and memory get what each gets alone, for every mechanism."""

from __future__ import annotations

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import offloading_manager

import hf_hyperattn as ha

from ..oracles.marks import first_always
from .test_continuous_batching import SERVED, page_size, steep

NEW = 6
TOKENS = torch.randint(5, 90, (64,), generator=torch.Generator().manual_seed(3)).tolist()
#: Longer than a step of 16 tokens, as long, shorter; four begin alike.
PROMPTS = [
    TOKENS[:45],
    TOKENS[20:23],
    TOKENS[:40] + [7, 8, 9],
    TOKENS[30:46],
    TOKENS[:24],
    TOKENS[50:55],
    TOKENS[:45] + [11],
    TOKENS[10:43],
]


def patched(name: str, family: str = "llama"):
    """A model with moved parameters, and the mechanism at full strength."""
    model = ha.patch_model(steep(family), SERVED[name], mode="replace")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".hyper." in parameter_name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def alone(model, prompts) -> list[tuple[list[int], torch.Tensor]]:
    """The tokens of `generate` for each prompt by itself, and their log-probabilities."""
    found = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = result.sequences[0, len(prompt) :]
        logits = torch.cat(result.logits).log_softmax(-1)
        found.append((tokens.tolist(), logits.gather(1, tokens[:, None])[:, 0]))
    return found


def together(model, prompts, **changes) -> list[tuple[list[int], torch.Tensor]]:
    """The same from continuous batching, with little memory and steps of 16 tokens."""
    settings = {page_size(): 8, "num_blocks": 32, "max_batch_tokens": 16, **changes}
    found = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, **settings),
        progress_bar=False,
    )
    assert not [r.error for r in found.values() if r.error]
    ordered = sorted(found.items(), key=lambda item: int(item[0].split("_")[-1]))
    return [(r.generated_tokens, torch.tensor(r.logprobs)) for _, r in ordered]


def check(found, expected):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, a), (_, b) in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@first_always("name", ["pages", *(name for name in SERVED if name != "pages")])
def test_chunks_and_shared_prefixes(name, monkeypatch):
    """Prompts come in chunks of 16 tokens, and later requests find the pages of earlier prompts."""
    model = patched(name)
    expected = alone(model, PROMPTS)
    assert [t for t, _ in expected] != [t for t, _ in alone(steep(), PROMPTS)]
    matched = watch_prefixes(monkeypatch)
    check(together(model, PROMPTS), expected)
    # Tokens that were not computed again. Queries of earlier steps belong to one request.
    assert sum(matched) >= 40 or name == "pages, previous"


@first_always("name", ["hype", *(name for name in SERVED if name != "hype")])
def test_evicted_requests(name, monkeypatch):
    """The memory holds two of the eight requests: others are taken out and computed again."""
    model = patched(name)
    count = watch_evictions(monkeypatch)
    check(together(model, PROMPTS, num_blocks=8), alone(model, PROMPTS))
    assert count


WINDOWED = [
    (name, family)
    for name in ("windows", "hsa", "hype", "pages", "pages, previous", "trilinear, windows", "cone")
    for family in ("mistral", "gemma2", "gpt_oss")
    if (name, family) != ("hsa", "gemma2")  # refuses softcaps
    and (name, family) != ("trilinear, windows", "gemma2")
]


@first_always("name, family", WINDOWED)
def test_layers_with_windows(name, family):
    """Sliding windows drop tokens of each request at another place."""
    model = patched(name, family)
    check(together(model, PROMPTS), alone(model, PROMPTS))


def watch_prefixes(monkeypatch) -> list[int]:
    """Lengths of the prefixes that requests find in the cache."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    original, found = PagedAttentionCache.search_prefix_match, []

    def search(self, *args):
        found.append(original(self, *args))
        return found[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", search)
    return found


def watch_evictions(monkeypatch) -> list[bool]:
    """One entry for each time that a request gives up its memory."""
    manager = offloading_manager.OffloadingManager
    original, found = manager.offload_requests, []

    def offload(self):
        found.append(original(self))
        return found[-1]

    monkeypatch.setattr(manager, "offload_requests", offload)
    return found
