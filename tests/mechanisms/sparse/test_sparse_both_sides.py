"""Sparse rules where queries see the tokens after them too: the definition as loops, padding, models, refusals."""

import json
from dataclasses import dataclass

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import (
    RULES,
    Clusters,
    Exact,
    NestedWindows,
    Pages,
    SparseRule,
    VerticalSlash,
    Window,
    sparse_rule,
)
from hf_hyperattn.mechanisms.sparse.head_rules import HeadRules
from hf_hyperattn.mechanisms.sparse.masking import mask_by_rules

LENGTH, SCALE = 43, 0.7
BOTH = [
    Exact(),
    Window(1, 0),
    Window(7, 2),
    Window(60, 0),
    Window(3, 60),
    Pages(5, 1, 4, 2),
    Pages(5, 6, 4, 2, "mean"),
    Pages(1, 0, 16, 1),
    Pages(1, 0, 1, 3, "mean"),
    Pages(4, 41, 8, 2),
    Pages(2, 0, 5, 0),
    Pages(1, 0, 3, 50, "mean"),
    Pages(1, 2, 64, 1),
    Pages(1, 0, 1, 3, query="first", chunk=4),
    Pages(6, 1, 4, 3, "mean", "first", 8),
    Pages(3, 1, 4, 2, query="chunk", chunk=8),
    Pages(2, 0, 2, 3, "mean", "chunk", 16),
    Pages(5, 1, 1, 4, "mean", channels=0.34),
    Pages(4, 1, 2, 4, query="chunk", chunk=4, channels=0.5),
]
name = lambda rule: json.dumps(rule.to_dict())[9:70]


def drawn(*shape, seed=0):
    return torch.randn(
        *shape, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def seen_by_definition(rule, query, key):
    """V_i of every query of one text and one head; queries and keys are [N, d] in float64."""
    length = len(query)
    everything = set(range(length))
    if isinstance(rule, Exact):
        return [everything] * length
    sinks = {j for j in everything if j < rule.sinks}
    if isinstance(rule, Window):
        return [sinks | {j for j in everything if abs(i - j) < rule.near} for i in range(length)]
    pages = [[j for j in everything if j // rule.page == a] for a in range(-(length // -rule.page))]
    rows = []
    for i in range(length):
        chunk = [t for t in range(length) if t // rule.chunk == i // rule.chunk]
        distance = {j: min(abs(j - t) for t in chunk) for j in everything}
        near = [page for page in pages if any(distance[j] < rule.near for j in page)]
        others = [page for page in pages if page not in near and not set(page) <= sinks]
        s = query[chunk].mean(0) if rule.query == "chunk" else query[chunk[0]]
        strongest = sorted(range(len(s)), key=lambda d, s=s: -abs(float(s[d])))
        kept = strongest[: max(1, round(rule.channels * len(s)))]
        scores = [score_of_page(rule, s, key[page], kept) for page in others]
        best = sorted(range(len(others)), key=lambda a, scores=scores: -scores[a])[: rule.top]
        rows.append(sinks.union(*near, *(others[a] for a in best)))
    return rows


def score_of_page(rule, s, keys, channels):
    total = 0.0
    for d in channels:
        column, q = keys[:, d].tolist(), float(s[d])
        total += (
            q * sum(column) / len(column)
            if rule.summary == "mean"
            else max(q * min(column), q * max(column))
        )
    return total


def attend_by_definition(rule, query, key, value):
    """[N, dv] of one head."""
    rows = []
    for i, tokens in enumerate(seen_by_definition(rule, query.detach(), key.detach())):
        tokens = sorted(tokens)
        rows.append(torch.softmax(SCALE * key[tokens] @ query[i], 0) @ value[tokens])
    return torch.stack(rows)


def mask_by_definition(rule, query, key):
    mask = torch.zeros(len(query), len(query), dtype=torch.bool)
    for i, tokens in enumerate(seen_by_definition(rule, query, key)):
        mask[i, sorted(tokens)] = True
    return mask


def attend(query, key, value, rules, **more):
    return ha.functional.sparse_attention(
        query, key, value, scale=SCALE, enable_gqa=True, rules=rules, **more
    )


@pytest.mark.parametrize("rule", BOTH, ids=name)
def test_a_rule_is_its_definition(rule):
    query, key, value = (
        drawn(1, 2, LENGTH),
        drawn(1, 1, LENGTH, seed=1),
        drawn(1, 1, LENGTH, seed=2),
    )
    out, mask = attend(query, key, value, rule), rule.mask(query, key, SCALE, is_causal=False)
    for h in range(2):
        assert torch.equal(mask[0, h], mask_by_definition(rule, query[0, h], key[0, 0]))
        expected = attend_by_definition(rule, query[0, h], key[0, 0], value[0, 0])
        torch.testing.assert_close(out[0, h], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 33])
@pytest.mark.parametrize("rule", BOTH, ids=name)
def test_texts_of_any_length(rule, length):
    query, key = drawn(1, 1, length), drawn(1, 1, length, seed=1)
    mask = rule.mask(query, key, SCALE, is_causal=False)
    assert torch.equal(mask[0, 0], mask_by_definition(rule, query[0, 0], key[0, 0]))


@pytest.mark.parametrize("kind", ["all the same", "few values", "opposite", "all zero"])
@pytest.mark.parametrize(
    "rule", [rule for rule in BOTH if isinstance(rule, Pages) and rule.page in (1, 2, 4)], ids=name
)
def test_of_equal_scores_the_first_wins(rule, kind):
    """Small integers, of which sums and means of 1, 2 and 4 are exact."""
    generator, length = torch.Generator().manual_seed(3), 42  # the last page of 4 has 2 tokens
    query = torch.randint(-2, 3, (1, 1, length, 4), generator=generator).double()
    key = torch.randint(-1, 2, (1, 1, length, 4), generator=generator).double()
    if kind == "all the same":
        key = key[:, :, :1].expand_as(key)
    elif kind == "opposite":
        key = key[:, :, :1] * (1 - 2 * (torch.arange(length) % 2))[:, None]
    elif kind == "all zero":
        key = torch.zeros_like(key)
    mask = rule.mask(query, key, SCALE, is_causal=False)
    assert torch.equal(mask[0, 0], mask_by_definition(rule, query[0, 0], key[0, 0]))


def test_the_last_page_is_scored_by_the_tokens_that_it_has():
    """Zeros in the place of the tokens that it lacks would win, or spoil its mean."""
    query, key = torch.ones(1, 1, 9, 2), -torch.ones(1, 1, 9, 2)
    key[0, 0, 8] = -0.5
    for summary in ("bounds", "mean"):
        mask = Pages(1, 0, 4, 1, summary).mask(query, key, is_causal=False)
        assert mask[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 8]
    key[0, 0, 8] = -2.0
    for summary in ("bounds", "mean"):
        mask = Pages(1, 0, 4, 1, summary).mask(query, key, is_causal=False)
        assert mask[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


PADDING = {
    "left": [*range(9)],
    "right": [*range(31, LENGTH)],
    "both": [0, 1, 40, 41, 42],
    "inside": [4, 5, 17, 30, 31, 32],
    "everywhere but one": [j for j in range(LENGTH) if j != 20],
}


@pytest.mark.parametrize("form", ["bool, a row", "bool", "additive"])
@pytest.mark.parametrize("hidden", PADDING.values(), ids=PADDING)
def test_padding_is_not_counted(hidden, form):
    rules = [BOTH[i] for i in (2, 6, 15, 17)]
    query, key, value = (
        drawn(2, 4, LENGTH),
        drawn(2, 2, LENGTH, seed=1),
        drawn(2, 2, LENGTH, seed=2),
    )
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, hidden] = False
    mask = real[:, None, None]
    if form == "bool":
        mask = mask & real[:, None, :, None]
    elif form == "additive":
        mask = torch.zeros_like(mask, dtype=torch.float64).masked_fill(
            ~mask, torch.finfo(torch.float64).min
        )
    out = attend(query, key, value, rules, attn_mask=mask)
    for b in range(2):
        rows = real[b].nonzero().flatten()
        for h, rule in enumerate(rules):
            parts = (query[b, h][rows], key[b, h // 2][rows], value[b, h // 2][rows])
            torch.testing.assert_close(
                out[b, h, rows], attend_by_definition(rule, *parts), atol=1e-12, rtol=0
            )
    assert out.isfinite().all()
    if form == "bool":
        assert not out[0][:, hidden].any()


def test_a_row_of_padding_gives_zeros():
    query, mask = drawn(2, 1, 12), torch.ones(2, 1, 1, 12, dtype=torch.bool)
    mask[1] = False
    for rule in (Window(3, 1), Pages(2, 1, 4, 1), Pages(2, 1, 4, 1, "mean", "chunk", 4)):
        out = attend(query, query, query, rule, attn_mask=mask)
        assert out.isfinite().all() and not out[1].any()


def test_packed_texts_are_refused_where_rules_count_from_a_beginning():
    query, text = drawn(1, 1, 20), torch.arange(20) >= 12
    packed = (text[:, None] == text)[None, None]
    for rule in (Pages(2, 0, 2, 1), Window(3, 1)):
        with pytest.raises(ValueError, match="its rules know rows of one whole text"):
            attend(query, query, query, rule, attn_mask=packed)
    out = attend(query, query, query, Window(3, 0), attn_mask=packed)
    for part in (slice(0, 12), slice(12, 20)):
        alone = query[0, 0, part]
        expected = attend_by_definition(Window(3, 0), alone, alone, alone)
        torch.testing.assert_close(out[0, 0, part], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rule", [BOTH[i] for i in (2, 5, 15)], ids=name)
def test_gradients(rule):
    inputs = [drawn(1, 2, 14, seed=seed).requires_grad_() for seed in range(3)]
    attend(*inputs, rule).square().sum().backward()
    found = [tensor.grad.clone() for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    heads = [attend_by_definition(rule, *(tensor[0, h] for tensor in inputs)) for h in range(2)]
    torch.stack(heads).square().sum().backward()
    for gradient, tensor in zip(found, inputs, strict=True):
        torch.testing.assert_close(gradient, tensor.grad, atol=1e-11, rtol=0)


@pytest.mark.parametrize("length", [1, 7, 40, 300])
@pytest.mark.parametrize("rule", [*BOTH, Window(), Pages(), Pages(query="chunk")], ids=name)
def test_shares_are_what_is_seen_and_scored_on_both_sides(rule, length):
    query, key = drawn(1, 1, length), drawn(1, 1, length, seed=1)
    seen = rule.mask(query, key, SCALE, is_causal=False).sum().item() / length**2
    share = rule.share_both_sides(length)
    if not isinstance(rule, Pages):
        assert share == pytest.approx(seen, abs=1e-12)
    else:
        assert seen <= share + 1e-12 and share <= 1


def test_pages_are_counted_as_they_are_scored():
    length, rule, counted = 64, Pages(8, 0, 4, 2, query="first", chunk=4), 0
    for i in range(length):
        first, last = max(0, i // 4 * 4 - 7) // 4, min(63, i // 4 * 4 + 3 + 7) // 4
        others = 16 - (last - first + 1)
        counted += 4 * (last - first + 1) + 4 * min(2, others) + (others / 4 if others > 2 else 0)
    assert rule.share_both_sides(length) == pytest.approx(counted / length**2, abs=1e-12)


ONE_SIDED = {
    "Pages(query='previous')": Pages(query="previous"),
    "Clusters()": Clusters(),
    "VerticalSlash()": VerticalSlash(),
    "NestedWindows()": NestedWindows(),
}
SIZES = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
)


@pytest.mark.parametrize("said", ONE_SIDED)
def test_rules_that_need_an_order_are_refused(said):
    rule, query = ONE_SIDED[said], drawn(1, 1, 8)
    for refused in (
        lambda: attend(query, query, query, [rule]),
        lambda: ha.patch_model(bert(), ha.SparseConfig([Exact(), Exact(), rule, Window()])),
        lambda: rule.share_both_sides(8),
    ):
        with pytest.raises(ValueError) as error:
            refused()
        assert (
            said in str(error.value)
            and "allowed" in str(error.value)
            and "\n" not in str(error.value)
        )


def test_calls_that_have_no_meaning_are_refused():
    with pytest.raises(
        ValueError,
        match=r"given SparseConfig\(lengths=\(8, 16\)\) for .*whose queries see the tokens aft",
    ):
        ha.patch_model(bert(), ha.SparseConfig([[Exact()], [Window()]], lengths=(8, 16)))
    with pytest.raises(
        ValueError, match="key has 8 tokens, query has 5; with is_causal=False they are one text"
    ):
        attend(drawn(1, 1, 5), drawn(1, 1, 8), drawn(1, 1, 8), Window())
    with pytest.raises(ValueError, match="first=1 is not allowed"):
        attend(*[drawn(1, 1, 8)] * 3, Window(), first=1)


def test_a_rule_of_ones_own_says_that_it_knows_both_sides():
    try:

        @sparse_rule("every_third")
        @dataclass(frozen=True)
        class EveryThird(SparseRule):
            only_causal = ""

            def share(self, length):
                return 1 / 3

            def share_both_sides(self, length):
                return 1 / 3

            def visible(self, call):
                return (call.tokens % 3 == 0) | (call.tokens == call.places)

        query = drawn(1, 1, 12)
        tokens = torch.arange(12)
        seen = (tokens % 3 == 0) | (tokens == tokens[:, None])
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, query, query, seen, scale=SCALE
        )
        torch.testing.assert_close(attend(query, query, query, EveryThird()), expected)
    finally:
        RULES.pop("every_third", None)


def bert(**changes):
    torch.manual_seed(0)
    config = hf.BertConfig(
        **SIZES | dict(max_position_embeddings=64, initializer_range=0.4) | changes
    )
    return hf.BertModel(config, add_pooling_layer=False).eval().double()


def vit():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    return (
        hf.ViTModel(hf.ViTConfig(**sizes, image_size=24, patch_size=4, initializer_range=0.4))
        .eval()
        .double()
    )


def t5():
    torch.manual_seed(0)
    config = dict(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return (
        hf.T5ForConditionalGeneration(hf.T5Config(**config, initializer_factor=3.0)).eval().double()
    )


def ids(rows=2, length=LENGTH):
    return torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(1))


def text():
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 35:] = 0
    return dict(input_ids=ids(), attention_mask=mask)


def image():
    return dict(
        pixel_values=torch.randn(
            2, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        )
    )


RULES_OF_HEADS = [Window(4, 1), Pages(3, 1, 4, 2), Pages(2, 1, 1, 5, "mean", "chunk", 4), Exact()]
ENCODERS = {"bert": (bert, text), "vit": (vit, image), "t5": (lambda: t5().encoder, text)}


@pytest.mark.parametrize("make, call", ENCODERS.values(), ids=ENCODERS)
def test_encoders(make, call, tmp_path):
    """Rules change the model, wide ones do not, padding is not counted; gradients flow, and the model is reloaded."""
    call = call()
    stock = make()(**call).last_hidden_state
    wide = ha.patch_model(
        make(), ha.SparseConfig([Exact(), Window(99), Pages(99), Pages(1, top=99)]), mode="replace"
    )
    real = slice(None) if "attention_mask" not in call else call["attention_mask"].bool()
    torch.testing.assert_close(
        wide(**call).last_hidden_state[real], stock[real], atol=1e-10, rtol=0
    )
    fresh = ha.patch_model(make(), ha.SparseConfig(RULES_OF_HEADS))
    torch.testing.assert_close(fresh(**call).last_hidden_state, stock, atol=1e-12, rtol=0)

    model = ha.patch_model(make(), ha.SparseConfig(RULES_OF_HEADS), mode="replace")
    out = model(**call).last_hidden_state
    assert (out - stock)[real].abs().max() > 1e-2
    out[real].square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if "attention_mask" in call:
        alone = model(input_ids=call["input_ids"][:1, :35]).last_hidden_state
        torch.testing.assert_close(out[:1, :35], alone, atol=1e-10, rtol=0)

    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(**call).last_hidden_state, out, atol=1e-12, rtol=0)
    ha.unpatch_model(model)
    assert torch.equal(model(**call).last_hidden_state, stock)


def test_a_layer_sees_what_the_rules_of_its_heads_say():
    """BERT's own attention under the masks of the definition."""
    model = ha.patch_model(
        bert(num_hidden_layers=1), ha.SparseConfig(RULES_OF_HEADS), mode="replace"
    )
    layer = model.encoder.layer[0].attention.self
    hidden = model.embeddings(ids(1))
    query, key, value = (
        linear(hidden).unflatten(2, (4, 8)).transpose(1, 2)
        for linear in (layer.query, layer.key, layer.value)
    )
    masks = [
        mask_by_definition(rule, query[0, h].detach(), key[0, h].detach())
        for h, rule in enumerate(RULES_OF_HEADS)
    ]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, torch.stack(masks)[None]
    )
    found = layer(hidden)[0]
    torch.testing.assert_close(found, expected.transpose(1, 2).flatten(2), atol=1e-12, rtol=0)


def test_an_encoder_with_a_decoder():
    """Cross-attention stays as it is; the decoder has causal rules, and generates with a cache as without."""
    call = text()
    start = torch.zeros(2, 1, dtype=torch.long)
    stock = t5()(**call, decoder_input_ids=start).logits
    model = ha.patch_model(t5(), ha.SparseConfig(RULES_OF_HEADS), mode="replace")
    assert not any(
        hasattr(block.layer[1].EncDecAttention, "hyper") for block in model.decoder.block
    )
    assert (model(**call, decoder_input_ids=start).logits - stock).abs().max() > 1e-2
    how = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False)
    assert torch.equal(
        model.generate(**call, **how), model.generate(**call, **how, use_cache=False)
    )
    encoder_only = ha.patch_model(
        t5(),
        ha.SparseConfig(Pages(query="chunk")),
        layers=lambda host: not host.is_causal,
        mode="replace",
    )
    encoder_only.generate(**call, **how)


def test_windows_of_an_encoder():
    """ModernBERT: rules select inside the window of a layer, on both sides."""
    torch.manual_seed(0)
    sizes = SIZES | dict(
        global_attn_every_n_layers=2, local_attention=16, initializer_range=0.4, pad_token_id=0
    )
    config = hf.ModernBertConfig(
        **sizes, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    )
    stock = hf.ModernBertModel(config).eval().double()
    whole = stock(ids()).last_hidden_state
    model = ha.patch_model(
        stock, ha.SparseConfig([Window(99), Exact(), Pages(99), Window(99)]), mode="replace"
    )
    torch.testing.assert_close(model(ids()).last_hidden_state, whole, atol=1e-10, rtol=0)
    seen = window_of_pages(Pages(1, 0, 2, 2), 9)
    assert all(abs(i - j) < 9 for i, row in enumerate(seen) for j in row)
    assert all(len(row) >= 4 for row in seen)


def window_of_pages(rule, window):
    """What each query sees of a text under a rule, inside a window."""
    from hf_hyperattn.engines import Options
    from hf_hyperattn.mechanisms.selection.places import read_mask
    from hf_hyperattn.mechanisms.sparse.masking import read_text

    query, key = drawn(1, 1, LENGTH), drawn(1, 1, LENGTH, seed=1)
    rules, options = HeadRules(((None, (rule,)),)), Options(window=window)
    known = read_text(query, key, read_mask(query, key, options, False), rules)
    mask = mask_by_rules(query, key, SCALE, options, rules, known, window).mask
    return [row.nonzero().flatten().tolist() for row in mask[0, 0]]


@pytest.mark.slow
def test_compiled_calls():
    torch._dynamo.reset()
    model = ha.patch_model(bert(), ha.SparseConfig(RULES_OF_HEADS), mode="replace")
    with torch.no_grad():
        expected = model(**text()).last_hidden_state
        found = torch.compile(model, backend="eager")(**text()).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
