"""Packed texts in calls whose masks cannot be read while they are recorded: compiled, and under torch.func."""

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.functional import sparse_attention
from hf_hyperattn.rules import Pages, Window
from tests.integration.models import llama
from tests.mechanisms.selection.test_packed_and_prefix import FORMS, LENGTHS, block_diagonal, tokens
from tests.oracles.cases import assert_close, qkv
from tests.oracles.marks import first_always

RULES = {"sinks": Window(near=3, sinks=1), "pages": Pages(near=2, sinks=1, page=2, top=1)}
every_rule = first_always("rule", ["pages", "sinks"])
every_backend = first_always("backend", ["aot_eager", "eager", "inductor"])
every_form = first_always("form", ["bool", "position_ids", "-1e4"])
SEVERAL_TEXTS = (
    "sparse was called with a mask .* its rules know rows of one whole text; allowed: .*"
)


def patched(*configs):
    torch.manual_seed(0)
    model = llama(num_hidden_layers=1)
    ha.patch_model(model, *configs, mode="replace")
    return model.double()


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@every_backend
@every_form
@every_rule
def test_a_compiled_sparse_model_refuses_packed_texts(rule, backend, form):
    model, ids = patched(ha.SparseConfig(RULES[rule])), tokens(1, sum(LENGTHS))
    call = compiled(model, backend)
    packed = FORMS[form]() | {"use_cache": False}
    with pytest.raises(RuntimeError, match=SEVERAL_TEXTS):
        call(ids, **packed)
    assert torch.is_grad_enabled()
    one_text = FORMS["bool"]() | {
        "attention_mask": block_diagonal([sum(LENGTHS)]),
        "use_cache": False,
    }
    one_text.pop("position_ids")
    with torch.no_grad():
        assert_close(
            call(ids, **one_text).logits, model(ids, use_cache=False).logits, 1e-6, "one text"
        )


@every_rule
def test_a_compiled_sparse_model_trains_on_one_text_and_refuses_two(rule):
    model, ids = patched(ha.SparseConfig(RULES[rule])), tokens(2, 14)
    call = compiled(model)
    loss = call(ids, labels=ids, use_cache=False).loss
    assert_close(loss, model(ids, labels=ids, use_cache=False).loss, 1e-6, "loss")
    loss.backward()
    packed = block_diagonal(LENGTHS).expand(2, -1, -1, -1)
    with pytest.raises(RuntimeError, match=SEVERAL_TEXTS):
        call(ids, labels=ids, attention_mask=packed, use_cache=False)


@every_rule
@pytest.mark.parametrize("left", [True, False])
@torch.no_grad()
def test_a_compiled_sparse_model_takes_padding(rule, left):
    model, ids = patched(ha.SparseConfig(RULES[rule])), tokens(2, 12)
    mask = torch.ones_like(ids)
    pad = slice(0, 5) if left else slice(7, 12)
    mask[0, pad] = 0
    real = slice(5, 12) if left else slice(0, 7)
    found = compiled(model)(ids, attention_mask=mask, use_cache=False).logits
    alone = model(ids[:1, real], use_cache=False).logits
    assert_close(found[:1, real], alone, 1e-6, "padded row")
    assert_close(found[1:], model(ids[1:], use_cache=False).logits, 1e-6, "whole row")


@every_rule
@torch.no_grad()
def test_a_compiled_sparse_model_decodes_a_padded_batch(rule):
    model, ids = patched(ha.SparseConfig(RULES[rule])), tokens(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache, call, found = hf.StaticCache(config=model.config, max_cache_len=20), compiled(model), []
    for start, stop in ((0, 13), (13, 14), (14, 15), (15, 16)):
        place = (mask.cumsum(1) - 1).clamp_min(0)[:, start:stop]
        part = dict(attention_mask=mask[:, :stop], position_ids=place, past_key_values=cache)
        found.append(call(ids[:, start:stop], **part).logits)
    found = torch.cat(found, 1)
    assert_close(found[:1, 5:], model(ids[:1, 5:], use_cache=False).logits, 1e-6, "padded row")
    assert_close(found[1:], model(ids[1:], use_cache=False).logits, 1e-6, "whole row")


@every_form
@torch.no_grad()
def test_a_compiled_hsa_model_begins_its_windows_with_every_text(form):
    model = patched(ha.HsaConfig(windows=(2, 4), tying="key", near=0, sinks=1, refine_top_k=0))
    ids, packed = tokens(1, sum(LENGTHS)), FORMS[form]() | {"use_cache": False}
    alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)
    assert_close(compiled(model)(ids, **packed).logits, alone, 1e-6, "packed against alone")


@every_rule
@every_backend
def test_a_compiled_function_refuses_packed_texts(rule, backend):
    q, k, v = qkv(batch=1, heads=2, lq=sum(LENGTHS), d=8)
    attend = lambda mask: sparse_attention(
        q, k, v, attn_mask=mask, is_causal=True, rules=RULES[rule]
    )
    call = compiled(attend, backend)
    with pytest.raises(RuntimeError, match=SEVERAL_TEXTS):
        call(block_diagonal(LENGTHS))
    one_text = block_diagonal([sum(LENGTHS)])
    assert_close(call(one_text), attend(None), 1e-6, "one text")


@every_rule
def test_a_function_under_vmap_refuses_packed_texts(rule):
    q, k, v = qkv(batch=1, heads=2, lq=sum(LENGTHS), d=8)
    attend = lambda mask: sparse_attention(
        q, k, v, attn_mask=mask, is_causal=True, rules=RULES[rule]
    )
    one_text = block_diagonal([sum(LENGTHS)])
    both = torch.func.vmap(attend)(torch.stack([one_text, one_text]))
    assert_close(both[1], attend(None), 1e-6, "one text")
    with pytest.raises(ValueError, match=SEVERAL_TEXTS):
        torch.func.vmap(attend)(torch.stack([one_text, block_diagonal(LENGTHS)]))


@torch.no_grad()
def test_rules_that_no_text_begins_for_take_packed_texts_when_compiled():
    model, ids = patched(ha.SparseConfig(Window(near=3, sinks=0))), tokens(1, sum(LENGTHS))
    packed = FORMS["bool"]() | {"use_cache": False}
    alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)
    assert_close(compiled(model)(ids, **packed).logits, alone, 1e-6, "packed against alone")
