"""What arrives as a mask under an implementation whose masks are bool, none, or additive."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import model_patches
from tests.model_patches.families import TEXT, ids, padded
from tests.model_patches.support import NAME, TOLERANCE, distance, outputs, reference, switch

CAUSAL = [
    "bloom",
    "codegen",
    "falcon-alibi",
    "falcon-multi-query",
    "gpt_neo",
    "gptj",
    "mpt",
    "trocr",
    "xglm",
]
BUILD_THEIR_OWN = ["cpmant", "deberta", "deberta-v2", "openai-gpt", "xlm"]


@pytest.mark.parametrize("name", [*CAUSAL, "mpnet", *BUILD_THEIR_OWN])
def test_additive_masks(name):
    """An implementation registered with additive masks, as "eager" has them."""
    model, inputs = TEXT[name](), padded("left")
    expected = outputs(model, inputs)
    model_patches.serve(model)
    with reference() as calls:
        AttentionMaskInterface.register(NAME, eager_mask)
        switch(model, NAME)
        found = outputs(model, inputs)
    assert calls and distance(found, expected, inputs["attention_mask"]) <= TOLERANCE


@pytest.mark.parametrize("name", CAUSAL)
def test_no_mask_without_padding(name):
    """Nothing is written out where position says it all; Falcon always asks for a mask."""
    model = TEXT[name]()
    model_patches.serve(model)
    with reference() as calls:
        switch(model, NAME)
        outputs(model, ids(length=4))
    assert all(call[2] for call in calls), "is_causal is said in the call"
    if not name.startswith("falcon"):
        assert [call[1] for call in calls] == [None] * len(calls)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_mask_function(name):
    """An attention function without a mask function gets None; causality must survive that."""
    model = TEXT[name]()
    expected = outputs(model, ids())
    model_patches.serve(model)
    with reference() as calls:
        AttentionInterface.register("unmasked", AttentionInterface._global_mapping[NAME])
        switch(model, "unmasked")
        found = outputs(model, ids())
        AttentionInterface._global_mapping.pop("unmasked")
    local = name == "gpt_neo"  # its local layers bring their own
    assert all(call[1] is None for call in calls[:: 2 if local else 1])
    assert distance(found, expected) <= TOLERANCE


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("name", ["codegen", "falcon-multi-query", "gpt_neo", "gptj"])
def test_masks_of_the_user(name, additive):
    """Four dimensions pass untouched: here block-diagonal and causal, two packed texts of five and six tokens."""
    text = torch.tensor([0] * 5 + [1] * 6)
    mask = (text[:, None] == text) & torch.ones(11, 11, dtype=torch.bool).tril()
    positions = torch.tensor([[*range(5), *range(6)]] * 2)
    model = TEXT[name]()
    parts = [model(input_ids=p).logits for p in ids()["input_ids"].split([5, 6], dim=1)]
    model_patches.serve(model)
    if additive:
        mask = torch.zeros(11, 11).masked_fill(~mask, torch.finfo(torch.float32).min)
    with reference(), torch.no_grad():
        switch(model, NAME)
        found = model(
            **ids(), attention_mask=mask.expand(2, 1, 11, 11), position_ids=positions
        ).logits
    assert (found - torch.cat(parts, dim=1)).abs().max() <= TOLERANCE


def test_mpt_keeps_the_meaning_of_the_users_mask():
    """MPT reads bool masks of four dimensions as True = hidden, and additive ones as non-zero = hidden."""
    model = TEXT["mpt"]()
    hidden = ~torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
    hidden[..., 2] = True
    hidden[..., 2, 2] = False
    for mask in (hidden, hidden * torch.finfo(torch.float32).min):
        expected = outputs(model, ids() | {"attention_mask": mask})
        model_patches.serve(model)
        with reference():
            before = switch(model, NAME)
            assert distance(outputs(model, ids() | {"attention_mask": mask}), expected) <= TOLERANCE
        switch(model, before)
        model_patches.unserve(model)


def test_gpt_neo_local_layers_see_their_window_only():
    model = TEXT["gpt_neo"]()
    model_patches.serve(model)
    with reference() as calls:
        switch(model, NAME)
        outputs(model, ids())
    local = calls[1][1]
    distance_back = torch.arange(11)[:, None] - torch.arange(11)
    assert torch.equal(
        local[0, 0], (distance_back >= 0) & (distance_back < model.config.window_size)
    )
