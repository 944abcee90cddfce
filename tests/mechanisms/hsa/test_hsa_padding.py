"""Hierarchical Self-Attention where padding lies: at every row's end, before a whole chunk, between real tokens."""

import pytest
import torch

from hf_hyperattn import HierarchicalCache, HsaConfig
from tests.integration.attention.test_families import logits
from tests.mechanisms.hsa.hsa_models import caches, ids_of, padded, patched, stepwise
from tests.oracles.cases import assert_close
from tests.oracles.marks import first_always

WINDOWED = {"mistral": {"sliding_window": 10}, "gpt_oss": {"sliding_window": 10}}
FAMILIES = ("llama", "gpt2", "mistral", "gpt_oss")


def right_padded(ids, lengths):
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return mask


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_at_the_end_of_every_row(family):
    """As where batches are padded to a multiple: nobody sees the last keys, and queries stand where they stood."""
    model = patched(family, sharp=2.0, **WINDOWED.get(family, {}))
    ids = ids_of(model, 20)
    mask = right_padded(ids, (15, 17))
    whole = logits(model, input_ids=ids, attention_mask=mask, use_cache=False)
    additive = ~(mask[:, None, None].bool() & torch.ones(20, 20, dtype=torch.bool).tril())
    additive = additive * torch.finfo(torch.float32).min
    by_hand = logits(model, input_ids=ids, attention_mask=additive, use_cache=False)
    for row, length in ((0, 15), (1, 17)):
        alone = logits(model, input_ids=ids[row : row + 1, :length], use_cache=False)[0]
        assert_close(whole[row, :length], alone, 1e-5 * alone.abs().max(), f"row {row}")
        if family not in WINDOWED:
            assert_close(
                by_hand[row, :length], alone, 1e-5 * alone.abs().max(), f"row {row}, a mask by hand"
            )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_after_padding_continue_the_windows(family):
    model = patched(family, sharp=2.0)
    ids = ids_of(model, 23)
    mask = torch.cat([right_padded(ids[:, :20], (15, 17)), torch.ones(2, 3, dtype=torch.long)], 1)
    positions = torch.tensor([[15, 16, 17], [17, 18, 19]])
    for name, cache in caches(model).items():
        logits(model, input_ids=ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        rest = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        got = logits(model, input_ids=ids[:, 20:], **rest)
        for row, length in ((0, 15), (1, 17)):
            real = torch.cat([ids[row, :length], ids[row, 20:]])[None]
            alone = logits(model, input_ids=real, use_cache=False)[0, length:]
            assert_close(got[row], alone, 1e-5 * alone.abs().max(), f"{name}, row {row}")


@pytest.mark.parametrize("family", FAMILIES)
def test_more_padding_than_the_first_chunk_has_tokens(family):
    model = patched(family, sharp=2.0, **WINDOWED.get(family, {}))
    inputs = padded(ids_of(model), 12)
    expected = logits(model, **inputs, use_cache=False)
    for name, cache in caches(model).items():
        got = stepwise(model, inputs, cache, parts=(0, 7, 14, 21, 30))
        assert_close(got[0], expected[0], 1e-5 * expected.abs().max(), name)
        assert_close(
            got[1, 12:], expected[1, 12:], 1e-5 * expected.abs().max(), f"{name}, padded row"
        )


def test_a_cache_that_forgets_waits_for_the_first_token_of_every_row(monkeypatch):
    monkeypatch.setattr("hf_hyperattn.mechanisms.hsa.means_kept.TAKEN_BACK", 2)
    model = patched("llama", HsaConfig((2, 4), near=1, sinks=2, refine_top_k=0), sharp=2.0)
    inputs = padded(ids_of(model, 70), 25)
    expected, cache = logits(model, **inputs, use_cache=False), HierarchicalCache(model, evict=True)
    got = stepwise(model, inputs, cache, parts=(0, 7, 14, 21, 28))
    assert_close(got[0], expected[0], 1e-5 * expected.abs().max(), "row 0")
    assert_close(got[1, 25:], expected[1, 25:], 1e-5 * expected.abs().max(), "padded row")
    assert cache.layers[0].store.has_evicted


@first_always("pads", [12, 0])
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_do_not_change_as_a_prompt_comes_in_chunks(family, pads):
    """A group of 3 that only one token of is there yet, beside a token that is a group of its own."""
    model = patched(family, sharp=2.0, **WINDOWED.get(family, {}))
    inputs = padded(ids_of(model), pads)
    groups = (
        torch.stack([torch.arange(41) // 7, torch.arange(41) // 3], -1).expand(2, -1, -1).clone()
    )
    groups[1, :pads] = -1
    inputs["hierarchy"] = groups
    expected = logits(model, **inputs, use_cache=False)
    for name, cache in caches(model).items():
        got = []
        for start, stop in ((0, 7), (7, 19), *((i, i + 1) for i in range(19, 41))):
            part = {k: inputs[k][:, start:stop] for k in ("input_ids", "position_ids")}
            part |= {"attention_mask": inputs["attention_mask"][:, :stop], "hierarchy": groups}
            got.append(logits(model, **part, past_key_values=cache))
        got = torch.cat(got, 1)
        assert_close(got[0], expected[0], 1e-5 * expected.abs().max(), name)
        assert_close(
            got[1, pads:], expected[1, pads:], 1e-5 * expected.abs().max(), f"{name}, padded row"
        )
