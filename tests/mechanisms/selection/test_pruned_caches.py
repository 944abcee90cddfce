"""Caches that were pruned in the middle: mechanisms that count cached keys refuse them, and only them."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.mechanisms import call_cache
from hf_hyperattn.rules import Clusters, NestedWindows, Pages, VerticalSlash, Window
from tests.integration.attention.test_families import model_of
from tests.mechanisms.sparse.test_sparse_models import drawn
from tests.registries import restored

#: Mechanisms whose results depend on where keys stand in their row.
COUNTING = {
    "hype": ha.HypeConfig(mu=0.15, tau=3.0),
    "hsa": ha.HsaConfig(windows=(2, 4), near=2, sinks=1, refine_top_k=1),
    "trilinear": ha.TrilinearConfig(windows=(4, 3)),
    "window": ha.SparseConfig(Window(4, 1)),
    "pages": ha.SparseConfig(Pages(2, 1, 2, 1)),
    "pages by the chunk before": ha.SparseConfig(Pages(2, 1, 2, 1, query="previous", chunk=2)),
    "clusters": ha.SparseConfig(Clusters(2, 1, 4, 2, 1)),
    "vertical and slash": ha.SparseConfig(VerticalSlash(2, 1, 2, 1, 4, 2)),
    "nested windows": ha.SparseConfig(NestedWindows((2, 4), 2, 1, 1)),
}
counting = pytest.mark.parametrize("name", COUNTING)
PROMPT, PRUNED = 16, range(5, 8)
REFUSED = "counts the keys of the cache, and position_ids=16 disagrees with the 13 that stand before this query"


def patched(config, family="llama", **changes):
    """A patched model whose added parameters are away from where they start."""
    model = ha.patch_model(model_of(family, "eager", **changes), config, mode="replace")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def by_name(name):
    model = model_of("llama", "eager")
    model.config.hyperattn = ha.HyperAttnConfig([COUNTING[name]]).to_dict()
    model.set_attn_implementation(name)
    return model


@torch.no_grad()
def logits(model, ids, **call):
    return model(ids, **call).logits


def pruned_cache(model, ids, **call):
    """The cache of a prompt, without some of its keys; these are not the first ones and not the last."""
    cache = hf.DynamicCache()
    logits(model, ids[:, :PROMPT], past_key_values=cache, **call)
    left = torch.tensor([place for place in range(PROMPT) if place not in PRUNED])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, left], layer.values[:, :, left]
    return cache


def places(start, stop, rows=1):
    return torch.arange(start, stop).expand(rows, -1)


@pytest.mark.parametrize("name", ["hype", "hsa"])
def test_a_pruned_cache_is_refused_by_name(name):
    model, ids = by_name(name), drawn(2, 20)
    with pytest.raises(ValueError, match=REFUSED):
        logits(
            model,
            ids[:, 16:17],
            past_key_values=pruned_cache(model, ids),
            position_ids=places(16, 17),
        )


def test_a_pruned_cache_is_refused_in_a_score_of_ones_own():
    with restored():

        @ha.score("pruned_slope")
        def pruned_slope(dot, query_position, key_position, slope=0.1):
            return dot + slope * (key_position - query_position)

        model, ids = patched(ha.ScoreConfig("pruned_slope")), drawn(2, 20)
        with pytest.raises(ValueError, match=f"pruned_slope {REFUSED}"):
            logits(
                model,
                ids[:, 16:17],
                past_key_values=pruned_cache(model, ids),
                position_ids=places(16, 17),
            )


@counting
def test_layers_pruned_apart_are_refused(name):
    """As methods do that give every layer a budget of its own: the first layer keeps all."""
    model, ids = patched(COUNTING[name]), drawn(1, 20)
    for call in ({}, dict(attention_mask=torch.ones(1, 17, dtype=torch.long))):
        cache, whole = pruned_cache(model, ids), hf.DynamicCache()
        logits(model, ids[:, :PROMPT], past_key_values=whole)
        cache.layers[0] = whole.layers[0]
        with pytest.raises(ValueError, match=REFUSED):
            logits(model, ids[:, 16:17], past_key_values=cache, position_ids=places(16, 17), **call)


@counting
def test_a_pruned_row_beside_padding_is_refused(name):
    model, ids = patched(COUNTING[name]), drawn(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    place = (mask.cumsum(1) - 1).clamp_min(0)
    cache = pruned_cache(model, ids, attention_mask=mask[:, :16], position_ids=place[:, :16])
    with pytest.raises(ValueError, match="disagrees with the"):
        step = dict(attention_mask=mask[:, 3:17][:, :14], position_ids=place[:, 16:17])
        logits(model, ids[:, 16:17], past_key_values=cache, **step)


@counting
def test_a_pruned_cache_whose_positions_are_counted_anew_is_served(name):
    """Where nobody says otherwise, a query stands behind the keys that there are: so the stock model turns it, too."""
    model, ids = patched(COUNTING[name]), drawn(2, 20)
    if name in ("pages by the chunk before", "vertical and slash"):
        pytest.skip("what this rule remembers is about the keys that were there")
    implicit = logits(model, ids[:, 16:17], past_key_values=pruned_cache(model, ids))
    explicit = logits(
        model, ids[:, 16:17], past_key_values=pruned_cache(model, ids), position_ids=places(13, 14)
    )
    assert torch.equal(implicit, explicit)


# What is no pruned cache


def steps_of(model, ids, sizes=(9, 1, 4, 1, 1), make_cache=hf.DynamicCache, **rows):
    """Logits of steps, each with its part of the rows of a mask (all of it so far) and of position ids."""
    cache, parts, place = make_cache(), [], 0
    for size in sizes:
        stop = place + size
        call = {
            name: t[:, :stop] if name == "attention_mask" else t[:, place:stop]
            for name, t in rows.items()
        }
        parts.append(logits(model, ids[:, place:stop], past_key_values=cache, **call))
        place = stop
    return torch.cat(parts, 1)


@counting
def test_padding_is_served_where_position_ids_count_slots(name):
    """As a plain call counts them; `generate` counts real tokens."""
    model, ids = patched(COUNTING[name]), drawn(2, 16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 3:7] = 0
    place = places(0, 16, 2)
    found = steps_of(model, ids, attention_mask=mask, position_ids=place)
    expected = logits(model, ids, attention_mask=mask, position_ids=place, use_cache=False)
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], atol=2e-5, rtol=0)


@counting
def test_position_ids_without_padding_are_served(name):
    model, ids = patched(COUNTING[name]), drawn(2, 16)
    expected = logits(model, ids)
    for rows in (1, 2):
        found = steps_of(model, ids, position_ids=places(0, 16, rows))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@counting
def test_position_ids_that_begin_elsewhere_are_served(name):
    """A number that is added to all position ids of a conversation, whose cache is then used for another one."""
    model, ids = patched(COUNTING[name]), drawn(2, 16)
    expected = logits(model, ids, position_ids=places(5, 21), use_cache=False)
    for rows, sizes in ((1, (9, 1, 4, 1, 1)), (2, (9, 1, 4, 1, 1)), (1, (1,) * 16)):
        found = steps_of(model, ids, sizes, position_ids=places(5, 21, rows))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    cache = hf.DynamicCache()
    for start in (0, 5, 0):
        cache.crop(-cache.get_seq_length())
        place = places(start, start + 16)
        expected = logits(model, ids, position_ids=place, use_cache=False)
        found = steps_of(model, ids, make_cache=lambda: cache, position_ids=place)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["hype", "hsa", "window"])
@pytest.mark.parametrize("padding", ["left", "middle"])
@pytest.mark.parametrize("counted", ["tokens", "slots"])
def test_padding_whose_position_ids_begin_elsewhere_is_served(name, padding, counted):
    model, ids = patched(COUNTING[name]), drawn(2, 16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, {"left": slice(0, 5), "middle": slice(3, 7)}[padding]] = 0
    place = (mask.cumsum(1) - 1).clamp_min(0) if counted == "tokens" else places(0, 16, 2)
    found = steps_of(model, ids, attention_mask=mask, position_ids=place + 5)
    expected = logits(model, ids, attention_mask=mask, position_ids=place + 5, use_cache=False)
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["hype", "hsa", "window"])
def test_one_tensor_of_position_ids_for_two_conversations(name):
    model, ids = patched(COUNTING[name]), drawn(1, 20)
    plain, prompt, step = hf.DynamicCache(), places(5, 21), torch.tensor([[21]])
    first, second = hf.DynamicCache(), hf.DynamicCache()
    for cache in (first, second):
        logits(model, ids[:, :16], past_key_values=cache, position_ids=prompt)
    logits(model, ids[:, :16], past_key_values=plain)
    for cache in (first, second, copy.deepcopy(second)):
        logits(model, ids[:, 16:17], past_key_values=cache, position_ids=step)
    with pytest.raises(ValueError, match="position_ids=21 disagrees with the 16"):
        logits(model, ids[:, 16:17], past_key_values=plain, position_ids=step)


@counting
def test_a_pruned_cache_whose_position_ids_begin_elsewhere_is_refused(name):
    model, ids = patched(COUNTING[name]), drawn(2, 20)
    for shift in (3, 5):  # 3 keys are dropped
        cache = pruned_cache(model, ids, position_ids=places(shift, 16 + shift))
        place = places(16 + shift, 17 + shift)
        with pytest.raises(
            ValueError,
            match=f"position_ids={16 + shift}, counted from {shift}, disagrees with the 13",
        ):
            logits(model, ids[:, 16:17], past_key_values=cache, position_ids=place)
    cache = pruned_cache(model, ids)
    with pytest.raises(ValueError, match="position_ids=18 disagrees with the 13"):
        logits(model, ids[:, 16:17], past_key_values=cache, position_ids=places(18, 19))


class SlottedCache:
    """A cache that takes no attributes, as a class of a caller's own may be."""

    __slots__ = ("inner",)

    def __init__(self):
        self.inner = hf.DynamicCache()

    def __getattr__(self, name):
        if name == "__dict__":
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("name", ["hype", "hsa"])
@pytest.mark.parametrize("way", ["by name", "a cache with slots", "a first call that nobody saw"])
def test_position_ids_whose_beginning_nobody_noted_are_refused_with_the_way_out(name, way):
    """They would be served by a patched model, which notes the number on the cache of the first call."""
    model, ids = by_name(name) if way == "by name" else patched(COUNTING[name]), drawn(1, 17)
    cache = SlottedCache() if way == "a cache with slots" else hf.DynamicCache()
    logits(model, ids[:, :16], past_key_values=cache, position_ids=places(5, 21))
    if way == "a first call that nobody saw":
        del cache.__dict__[call_cache.SHIFT]
    needed = "position_ids that begin at another number than 0 need patch_model, and a cache that takes attributes"
    with pytest.raises(ValueError, match=f"position_ids=21 disagrees with the 16 .*; {needed}"):
        logits(model, ids[:, 16:17], past_key_values=cache, position_ids=places(21, 22))
    cache = SlottedCache() if way == "a cache with slots" else hf.DynamicCache()
    found = steps_of(model, ids, (16, 1), make_cache=lambda: cache, position_ids=places(0, 17))
    torch.testing.assert_close(found, logits(model, ids, use_cache=False), atol=2e-5, rtol=0)


@counting
def test_position_ids_that_begin_elsewhere_with_a_static_cache(name):
    model, ids = patched(COUNTING[name]), drawn(2, 16)
    found = steps_of(
        model,
        ids,
        position_ids=places(5, 21),
        make_cache=lambda: hf.StaticCache(config=model.config, max_cache_len=24),
    )
    expected = logits(model, ids, position_ids=places(5, 21), use_cache=False)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@counting
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "gemma2", "gpt_oss")),
    ],
)
def test_generate_with_every_cache(name, family):
    """Sliding windows drop keys at the front, static caches have empty slots, assisted decoding takes tokens back."""
    if name == "vertical and slash" and family != "llama":
        pytest.skip(
            "a sliding window drops the columns that the rule measures, so that it is refused there"
        )
    try:
        model = patched(COUNTING[name], family)
    except ValueError as error:
        pytest.skip(str(error))
    ids, mask = drawn(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :4] = 0
    how = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    padded = dict(attention_mask=mask, **how)
    expected = model.generate(ids, use_cache=False, **padded)
    caches = [{}, dict(cache_implementation="static", disable_compile=True)]
    caches += [
        dict(past_key_values=ha.HierarchicalCache(model, evict=evict)) for evict in (False, True)
    ]
    for cache in caches:
        assert torch.equal(model.generate(ids, **cache, **padded), expected)
    plain = model.generate(ids[1:], use_cache=False, **how)
    assistant = model_of(family, "eager", num_hidden_layers=1)
    assert torch.equal(model.generate(ids[1:], assistant_model=assistant, **how), plain)
    assert torch.equal(model.generate(ids[1:], prefill_chunk_size=4, **how), plain)


@pytest.mark.parametrize("name", ["hype", "hsa", "window"])
def test_positions_of_images_are_served(name):
    """M-RoPE counts the tokens of an image by row and column, so that they are fewer positions than tokens."""
    text = dict(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    text |= dict(
        num_key_value_heads=2, rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2])
    )
    text |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=64)
    torch.manual_seed(0)
    stock = hf.Qwen2VLTextModel(hf.Qwen2VLTextConfig(**text)).eval()
    config = ha.HyperAttnConfig(
        [COUNTING[name]], mode="replace", layers=lambda host: host.is_causal
    )
    model, ids = ha.patch_model(stock, config), drawn(2, 16)
    place = places(0, 16, 2).expand(3, -1, -1).clone()
    place[..., 4:8], place[..., 8:] = (
        4,
        place[..., 8:] - 3,
    )  # an image of four tokens at one position
    rows = torch.cat(
        [places(0, 16, 2)[None], place]
    )  # text positions before the others, as `generate` gives them
    with torch.no_grad():
        for ids_of_call in (place, rows):
            expected = model(ids, position_ids=ids_of_call, use_cache=False).last_hidden_state
            cache, parts, start = hf.DynamicCache(), [], 0
            for size in (9, 1, 4, 1, 1):
                stop = start + size
                call = dict(position_ids=ids_of_call[..., start:stop], past_key_values=cache)
                parts.append(model(ids[:, start:stop], **call).last_hidden_state)
                start = stop
            torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_position_ids_are_compared_once_a_model_call(mode, monkeypatch):
    """With one comparison, if they count slots, which all layers share."""
    model, ids, compared = patched(COUNTING["hsa"], num_hidden_layers=3), drawn(1, 8), []
    original = call_cache.find_disagreeing

    def find_disagreeing(places, *args):
        uncounted = SimpleNamespace(real=places.real)
        compared.append(original(uncounted, *args))
        return compared[-1]

    with mode():
        cache = model(ids[:, :5]).past_key_values
        monkeypatch.setattr(call_cache, "find_disagreeing", find_disagreeing)
        for place in range(5, 8):
            cache = model(ids[:, place : place + 1], past_key_values=cache).past_key_values
    assert compared == [None] * 3


def test_what_is_read_once_is_read_again_where_it_differs():
    """One tensor of position ids in several calls, changed in place, and with other numbers of keys."""
    model, ids = patched(COUNTING["hype"]), drawn(1, 20)
    place = torch.tensor([[16]])
    whole = hf.DynamicCache()
    logits(model, ids[:, :16], past_key_values=whole)
    logits(model, ids[:, 16:17], past_key_values=whole, position_ids=place)
    with pytest.raises(ValueError, match=REFUSED):
        logits(model, ids[:, 16:17], past_key_values=pruned_cache(model, ids), position_ids=place)
    place += 1
    logits(model, ids[:, 17:18], past_key_values=whole, position_ids=place)
    mask = torch.ones(1, 19, dtype=torch.long)
    logits(
        model,
        ids[:, 18:19],
        past_key_values=whole,
        position_ids=torch.tensor([[18]]),
        attention_mask=mask,
    )
    whole.crop(-1)
    place += 2
    with pytest.raises(ValueError, match="position_ids=19 disagrees with the 18"):
        logits(model, ids[:, 18:19], past_key_values=whole, position_ids=place)


@counting
def test_layers_of_several_kinds_share_their_position_ids(name):
    """Some layers have masks and others none, where a sliding window is longer than the text or shorter."""
    kinds = dict(
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
    )
    sizes = dict(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    stock = hf.Qwen2ForCausalLM(hf.Qwen2Config(intermediate_size=48, **sizes | kinds)).eval()
    if name == "vertical and slash":
        pytest.skip("refused with sliding windows")
    model, ids = ha.patch_model(stock, COUNTING[name], mode="replace"), drawn(2, 16)
    found = steps_of(
        model,
        ids,
        position_ids=places(0, 16),
        make_cache=lambda: hf.DynamicCache(config=model.config),
    )
    torch.testing.assert_close(found, logits(model, ids), atol=2e-5, rtol=0)
