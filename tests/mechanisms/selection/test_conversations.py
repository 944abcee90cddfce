"""Conversations on one model know nothing of each other: what a layer remembers of one belongs to its cache."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from transformers import cache_utils

import hf_hyperattn as ha
from hf_hyperattn.rules import Clusters, NestedWindows, Pages, VerticalSlash, Window
from tests.mechanisms.sparse.test_sparse_models import drawn as drawn_texts
from tests.mechanisms.sparse.test_sparse_models import in_steps, llama, logits, sparse

#: Rules that select by earlier queries, one of every `query=` kind whose prompts and steps agree, and others.
RULES = {
    "pages by the chunk before": Pages(6, 1, 4, 2, query="previous", chunk=4),
    "pages by the first query": Pages(6, 1, 4, 2, query="first", chunk=4),
    "pages by each query": Pages(6, 1, 4, 2),
    "clusters by the first query": Clusters(3, 1, 8, 2, 3, query="first", chunk=4),
    "clusters by the chunk before": Clusters(3, 1, 8, 2, 3, query="previous", chunk=4),
    "vertical and slash": VerticalSlash(4, 1, 3, 2, 8, 4),
    "nested windows by the chunk before": NestedWindows((2, 4), 3, 1, 2, query="previous", chunk=4),
    "window": Window(5, 1),
}
SHARED = RULES["pages by the chunk before"]
TOO_FAR = "cropped to more than 64 tokens before the most that it held, or was filled under .* allowed: query='own'"
#: What a prompt of these shows of the queries in a chunk depends on how many are known, so that steps differ from it.
BY_STEPS = Pages(6, 1, 4, 2, query="chunk", chunk=4)
LENGTH = 29
STEPS = (12, *[1] * 10, 3, *[1] * 4)
MECHANISMS = {
    "cone": ha.ConeConfig(),
    "hyperbolic": ha.HyperbolicConfig(),
    "hype": ha.HypeConfig(max_length=64),
    "hsa": ha.HsaConfig(windows=(2, 4), near=2, sinks=1, refine_top_k=1),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "mkl": ha.MklConfig(kind="conditional"),
    "trilinear": ha.TrilinearConfig(windows=(8, 4)),
    "sparse": ha.SparseConfig(SHARED),
}
CACHES = {
    "dynamic": lambda model: hf.DynamicCache(config=model.config),
    "static": lambda model: hf.StaticCache(config=model.config, max_cache_len=LENGTH + 3),
    "hierarchical": lambda model: ha.HierarchicalCache(model),
    "forgetful": lambda model: ha.HierarchicalCache(model, evict=True),
}


def drawn(rows=2, length=LENGTH):
    return drawn_texts(rows, length)


def patched(config):
    """A patched model, in float64, whose added parameters are away from where they start."""
    model = ha.patch_model(llama(), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def talk_in_turn(model, texts, make_cache=CACHES["dynamic"]):
    """The logits of each text, all read a few tokens at a time in turn."""
    caches, parts, place = [make_cache(model) for _ in texts], [[] for _ in texts], 0
    for size in STEPS:
        for text, cache, part in zip(texts, caches, parts, strict=True):
            part.append(logits(model, text[:, place : place + size], past_key_values=cache))
        place += size
    return [torch.cat(part, 1) for part in parts]


@pytest.mark.slow
def test_many_chats_in_turn():
    check_chats(SHARED, 24)


def check_chats(rule, count):
    model, texts = sparse([rule], num_hidden_layers=1), drawn(count)[:, None]
    for found, text in zip(talk_in_turn(model, texts), texts, strict=True):
        torch.testing.assert_close(found, logits(model, text), atol=1e-10, rtol=0)


@pytest.mark.parametrize("cache", CACHES)
def test_chats_in_turn_with_every_cache(cache):
    """As each conversation alone, on a model that has seen no other."""
    rule = BY_STEPS
    texts, model = drawn(5)[:, None], sparse([rule], num_hidden_layers=1)
    alone = [talk_in_turn(sparse([rule], num_hidden_layers=1), [text])[0] for text in texts]
    for found, expected in zip(talk_in_turn(model, texts, CACHES[cache]), alone, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("cache", ["dynamic", "hierarchical"])
def test_threads(name, cache):
    """Six threads write at once, texts of other lengths with padding of their own."""
    model, texts = patched(MECHANISMS[name]).float(), drawn(6)
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)

    def write(index):
        ids = texts[index : index + 1, : 20 + index].repeat(2, 1)
        mask = torch.ones_like(ids)
        mask[0, : 3 + index] = 0
        return model.generate(
            ids, attention_mask=mask, past_key_values=CACHES[cache](model), **options
        )

    alone = list(map(write, range(6)))
    with ThreadPoolExecutor(6) as threads:
        for found, expected in zip(threads.map(write, range(6)), alone, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("candidates", [5, 20])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_assisted_decoding(rule, candidates):
    """Candidates that are not taken are cropped from the cache, often more of them than a chunk has."""
    model, ids = sparse([rule]), drawn(1, 20)
    options = dict(max_new_tokens=16, min_new_tokens=16, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, use_cache=False, **options)
    assistant = llama(num_hidden_layers=1)
    assistant.generation_config.num_assistant_tokens = candidates
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["", "pickle"]
)
def test_a_prefix_is_used_again(rule, copied):
    """Copies of the cache of one prompt go on with texts of their own, each to the end before the next begins."""
    model, texts = sparse([rule], num_hidden_layers=1), drawn(6)
    texts[:, :18] = texts[0, :18]
    _, prefix = in_steps(model, texts[:1], [10, 8])
    for text in texts[:, None]:
        found, _ = in_steps(model, text[:, 18:], [1, 3, *[1] * 7], copied(prefix))
        torch.testing.assert_close(found, logits(model, text)[:, 18:], atol=1e-10, rtol=0)


def test_a_prefix_is_used_again_by_a_copy_of_the_model():
    model, ids = sparse(), drawn()
    _, prefix = in_steps(model, ids, [18])
    found, _ = in_steps(copy.deepcopy(model), ids[:, 18:], [1] * 11, prefix)
    torch.testing.assert_close(found, logits(model, ids)[:, 18:], atol=1e-10, rtol=0)


def test_a_prompt_is_gone_back_to():
    """A cache that is cropped to the end of its prompt, after more tokens than are kept of the last steps."""
    model, texts = sparse([SHARED], num_hidden_layers=1), drawn(3, 110)
    texts[:, :20] = texts[0, :20]
    _, cache = in_steps(model, texts[:1], [20])
    for text in texts[:, None]:
        found, _ = in_steps(model, text[:, 20:], [9] * 10, cache)
        torch.testing.assert_close(found, logits(model, text)[:, 20:], atol=1e-10, rtol=0)
        cache.crop(-90)
    in_steps(model, texts[:1, 20:], [9] * 9, cache)
    cache.crop(-70)
    with pytest.raises(ValueError, match=TOO_FAR):
        logits(model, texts[:1, 31:32], past_key_values=cache)


@pytest.mark.parametrize("name", ["dynamic", "hierarchical"])
def test_crops_add_up(name):
    """How far one can go back counts from the most tokens that there were, in one crop or in several."""
    model, ids = sparse([SHARED], num_hidden_layers=1), drawn(1, 110)
    expected = logits(model, ids)
    _, cache = in_steps(model, ids, [10, *[1] * 100], CACHES[name](model))
    for back in (30, 35):  # to 80 tokens, then from 81 to 46, 64 before 110
        cache.crop(-back)
        at = cache.get_seq_length()
        found = logits(model, ids[:, at : at + 1], past_key_values=cache)
        torch.testing.assert_close(found, expected[:, at : at + 1], atol=1e-10, rtol=0)
    assert at == 46
    cache.crop(-17)  # some more may be held, since room is freed now and then
    with pytest.raises(ValueError, match=TOO_FAR):
        logits(model, ids[:, 30:31], past_key_values=cache)


def test_a_cache_that_is_reset_begins_again():
    model = sparse([SHARED], num_hidden_layers=1)
    for cache in (
        hf.DynamicCache(),
        ha.HierarchicalCache(),
        hf.StaticCache(config=model.config, max_cache_len=LENGTH),
    ):
        for text in drawn(3)[:, None]:
            torch.testing.assert_close(
                in_steps(model, text, STEPS, cache)[0], logits(model, text), atol=1e-10, rtol=0
            )
            cache.reset()


def test_rows_are_repeated_and_selected():
    model, ids = sparse([SHARED]), drawn(3)
    _, cache = in_steps(model, ids, [19, 1])
    cache.batch_repeat_interleave(2)
    several = ids.repeat_interleave(2, 0)
    found, _ = in_steps(model, several[:, 20:], [1, 2], cache)
    torch.testing.assert_close(found, logits(model, several)[:, 20:23], atol=1e-10, rtol=0)
    rows = torch.tensor([4, 1])
    cache.batch_select_indices(rows)
    found, _ = in_steps(model, several[rows, 23:], [1, 3, 1], cache)
    torch.testing.assert_close(found, logits(model, several[rows])[:, 23:28], atol=1e-10, rtol=0)


def test_encoder_decoder_caches():
    sizes = dict(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4
    )
    sizes |= dict(
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, decoder_start_token_id=1
    )
    torch.manual_seed(0)
    stock = hf.BartForConditionalGeneration(
        hf.BartConfig(**sizes, init_std=0.3, forced_eos_token_id=None)
    ).eval()
    config = ha.HyperAttnConfig(
        [ha.SparseConfig(SHARED)], mode="replace", layers=lambda host: host.is_causal
    )
    model, sources, targets = ha.patch_model(stock.double(), config), drawn(5, 9), drawn(5)
    caches = [hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache()) for _ in range(5)]
    expected = [
        logits(model, s[None], decoder_input_ids=t[None])
        for s, t in zip(sources, targets, strict=True)
    ]
    place = 0
    for size in STEPS:
        for index, cache in enumerate(caches):
            call = dict(
                decoder_input_ids=targets[index : index + 1, place : place + size],
                past_key_values=cache,
            )
            found = logits(model, sources[index : index + 1], **call)
            torch.testing.assert_close(
                found, expected[index][:, place : place + size], atol=1e-10, rtol=0
            )
        place += size


def test_caches_that_round_their_keys_are_refused():
    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this Transformers quantises no cache by itself")
    options = dict(
        max_new_tokens=4, do_sample=False, pad_token_id=0, cache_implementation="quantized"
    )
    options |= dict(cache_config=dict(backend="fp8"))
    with pytest.raises(ValueError, match="rounds its keys, was cropped .* allowed: query='own'"):
        sparse([SHARED]).generate(drawn(1), **options)
    sparse([RULES["pages by each query"]]).generate(drawn(1), **options)


def test_a_cache_that_was_put_together_is_refused():
    model, ids = sparse([SHARED]), drawn()
    _, cache = in_steps(model, ids, [20])
    other = hf.DynamicCache()
    for index, layer in enumerate(cache.layers):
        other.update(layer.keys, layer.values, index)
    with pytest.raises(ValueError, match="was put together from other tensors"):
        logits(model, ids[:, 20:21], past_key_values=other)


def test_a_model_keeps_nothing_of_a_conversation():
    model, ids = sparse([SHARED]), drawn()
    logits(
        model, ids[:, :4]
    )  # The first call takes the hooks away that watch whether it reaches the mechanism.
    before = len(pickle.dumps(model))
    _, cache = in_steps(model, ids, [20, 1])
    with pytest.raises(RuntimeError):
        logits(model, ids[:1], past_key_values=cache)  # another number of rows
    alive = weakref.ref(cache)
    del cache
    gc.collect()
    assert alive() is None
    assert len(pickle.dumps(model)) == before


def test_hooks_come_with_the_rules_that_need_them():
    def count(model):
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    def called(rule):
        model = sparse([rule])
        logits(
            model, drawn()[:, :4]
        )  # The first call takes the hooks away that watch whether it reaches the mechanism.
        return model

    model = called(SHARED)
    assert count(model) == 4 and count(ha.unpatch_model(model)) == 0
    # Others need the cache in the first layer alone, for the position ids of the conversation.
    assert count(called(RULES["window"])) == count(called(RULES["pages by each query"])) == 2
