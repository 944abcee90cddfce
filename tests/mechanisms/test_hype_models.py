"""HyPE in models: by name and by patch, in padded, packed, cached, chunked, windowed and assisted runs."""

import copy

import pytest
import torch
import transformers as hf
from transformers import DynamicCache, StaticCache

import hf_hyperattn as ha
from hf_hyperattn import HypeConfig, patch_model, unpatch_model
from hf_hyperattn.engines import Options
from hf_hyperattn.functional import cone_scores, hype_bias, hyperbolic_scores
from hf_hyperattn.integration.hyper import Hyper
from hf_hyperattn.mechanisms.base import Host, HostCall
from tests.integration.models import FAMILIES, State, bert, difference, llama, perturb, run, train
from tests.integration.test_families import CAUSAL, ENCODERS, generate, inputs_of, logits, model_of
from tests.zoo.inputs import words
from tests.zoo.probe import counted

STEEP = dict(
    mu=0.15, tau=(6.0, 3.0, 1.5, 0.7)
)  # the bias decides: at distance 9 it is 10 logits in the first head
every_causal = pytest.mark.parametrize("family", CAUSAL)


def steep(family, **changes):
    """A tiny model in which a wrong distance changes every logit."""
    return patch_model(model_of(family, "eager", **changes), HypeConfig(**STEEP), mode="replace")


def ids_of(model, length=9, rows=2):
    return words(model.config, length=length)[:rows]


# By name.


@pytest.mark.parametrize("family", (*CAUSAL, *ENCODERS, "bart"))
def test_loads_by_name_and_runs_forward_and_backward(family):
    model = model_of(family, "hype")
    inputs = inputs_of(family, model)
    with counted("hype") as modules:
        out = model(**inputs).logits
    assert modules and out.isfinite().all()
    out.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    stock = model_of(family, "eager")
    assert (logits(model, **inputs) - logits(stock, **inputs)).abs().max() > 1e-5


@pytest.mark.parametrize("family", ("llama", "gpt2", "bert", "bart"))
def test_by_name_is_replace_with_the_defaults(family):
    named, patched = (
        model_of(family, "hype"),
        patch_model(model_of(family, "eager"), HypeConfig(), mode="replace"),
    )
    inputs = inputs_of(family, named)
    torch.testing.assert_close(logits(named, **inputs), logits(patched, **inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ("t5", "vit", "whisper"))
def test_a_model_that_says_no_length_must_be_given_one(family):
    model = model_of(family, "hype")
    with pytest.raises(
        ValueError, match=r"max_length=None .*max_position_embeddings.*max_length=\.\.\."
    ) as caught:
        model(**inputs_of(family, model))
    assert "\n" not in str(caught.value) and type(model.config).__name__ in str(caught.value)
    state = State(other := model_of(family, "eager"))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        patch_model(other, HypeConfig())
    assert state.differences(State(other)) == []
    patch_model(other, HypeConfig(max_length=64), mode="replace")(**inputs_of(family, other))


def test_cross_attention_keeps_its_dot_product_and_is_refused_by_patch():
    """By name the decoder's cross-attention is stock: cut off from it, nothing of the encoder's order is left."""
    model, stock = model_of("bart", "hype"), model_of("bart", "sdpa")
    cross = model.model.decoder.layers[0].encoder_attn, stock.model.decoder.layers[0].encoder_attn
    states = torch.randn(2, 5, model.config.d_model), torch.randn(2, 9, model.config.d_model)
    with torch.no_grad():
        ours, theirs = (c(states[0], key_value_states=states[1])[0] for c in cross)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="hype has no meaning for cross-attention"):
        patch_model(stock, HypeConfig(), include_cross_attention=True)


# Padding, packing.


@every_causal
def test_left_and_right_padded_rows_equal_unpadded_ones(family):
    model = steep(family)
    ids = ids_of(model)
    exact = logits(model, input_ids=ids)
    pads = torch.full((2, 3), model.config.pad_token_id or 0)
    for padded, real in (
        (torch.cat([pads, ids], 1), slice(3, None)),
        (torch.cat([ids, pads], 1), slice(0, 9)),
    ):
        mask = torch.zeros_like(padded)
        mask[:, real] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        got = logits(model, input_ids=padded, attention_mask=mask, position_ids=positions)[:, real]
        torch.testing.assert_close(got, exact, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ENCODERS)
def test_padded_encoder_rows_equal_unpadded_ones(family):
    model = steep(family)
    ids = ids_of(model)
    padded = torch.cat([ids, torch.full((2, 3), model.config.pad_token_id)], 1)
    mask = (torch.arange(12) < 9).long().repeat(2, 1)
    got = logits(model, input_ids=padded, attention_mask=mask)[:, :9]
    torch.testing.assert_close(got, logits(model, input_ids=ids), atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ("llama", "qwen3", "gpt2"))
def test_padding_in_the_middle_does_not_count(family):
    """What generation from a right-padded prompt looks like: tokens, padding, tokens."""
    model = steep(family)
    ids = ids_of(model)
    exact = logits(model, input_ids=ids)
    hole = torch.cat([ids[:, :5], torch.full((2, 3), model.config.pad_token_id or 0), ids[:, 5:]], 1)
    mask = torch.ones_like(hole)
    mask[:, 5:8] = 0
    where = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    got = logits(model, input_ids=hole, **where)
    torch.testing.assert_close(got[:, mask[0].bool()], exact, atol=2e-5, rtol=0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(
            hole[:, :8],
            attention_mask=mask[:, :8],
            position_ids=where["position_ids"][:, :8],
            past_key_values=cache,
        )
        last = model(hole[:, 8:9], attention_mask=mask[:, :9], position_ids=where["position_ids"][:, 8:9],
                     past_key_values=cache).logits[:, 0]  # fmt: skip
    torch.testing.assert_close(last, exact[:, 5], atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", [f for f in CAUSAL if f != "gpt_oss"])
def test_packed_sequences_count_for_themselves(family):
    model = steep(family)
    ids = ids_of(model, rows=1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = logits(model, input_ids=ids, position_ids=positions, use_cache=False)
    for part in (slice(0, 4), slice(4, 9)):
        alone = logits(model, input_ids=ids[:, part], use_cache=False)
        torch.testing.assert_close(packed[:, part], alone, atol=2e-5, rtol=0)


# Caches: every way of feeding the tokens gives the logits of the full forward pass.

CHUNKS = {
    "one by one": [1] * 9,
    "prompt, then one by one": [5, 1, 1, 1, 1],
    "chunks": [4, 3, 2],
    "tail": [1, 8],
}


def fed(model, ids, mask, cache, sizes):
    """Logits [B, L, V] of the tokens fed in pieces of these sizes."""
    out, start = [], 0
    for size in sizes:
        end = start + size
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
        given = {} if mask.all() else {"attention_mask": mask[:, :end]}
        with torch.no_grad():
            out.append(
                model(
                    ids[:, start:end], position_ids=positions, past_key_values=cache, use_cache=True, **given
                ).logits
            )
        start = end
    return torch.cat(out, 1)


@every_causal
@pytest.mark.parametrize("how", CHUNKS)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_a_cache_gives_the_logits_of_the_full_pass(family, how, static, padded):
    model = steep(family)
    ids = ids_of(model)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    exact = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    cache = StaticCache(model.config, max_cache_len=14) if static else DynamicCache(config=model.config)
    got = fed(model, ids, mask, cache, CHUNKS[how])
    real = mask.bool()
    torch.testing.assert_close(got[real], exact[real], atol=3e-5, rtol=0)


@pytest.mark.parametrize("family", ("mistral", "gemma2", "gpt_oss"))
@pytest.mark.parametrize("how", CHUNKS)
def test_sliding_caches_that_have_dropped_keys(family, how):
    model = steep(family, sliding_window=4)
    ids = ids_of(model)
    exact = logits(model, input_ids=ids, use_cache=False)
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=12)):
        got = fed(model, ids, torch.ones_like(ids), cache, CHUNKS[how])
        torch.testing.assert_close(got, exact, atol=3e-5, rtol=0)


@pytest.mark.parametrize("family", (*CAUSAL, "bart"))
def test_greedy_generation_with_any_cache_equals_without(family):
    model = steep(family)
    inputs = inputs_of(family, model)
    plain = generate(model, inputs, use_cache=False)
    assert torch.equal(generate(model, inputs, use_cache=True), plain)
    assert torch.equal(generate(model, inputs, cache_implementation="static", disable_compile=True), plain)


@pytest.mark.parametrize("family", ("llama", "gpt2", "mistral"))
def test_assisted_and_chunked_generation_equal_greedy(family):
    model = steep(family)
    torch.manual_seed(1)
    assistant = model_of(family, "eager", num_hidden_layers=1)
    inputs = {"input_ids": ids_of(model, rows=1)}
    plain = generate(model, inputs)
    assert torch.equal(generate(model, inputs, assistant_model=assistant), plain)
    assert torch.equal(generate(model, inputs, prefill_chunk_size=4), plain)


def test_beams_and_padded_generation():
    model = steep("llama")
    ids = ids_of(model)
    padded = torch.cat([torch.full((2, 3), 0), ids], 1)
    mask = (torch.arange(12) >= 3).long().repeat(2, 1)
    for how in ({}, {"num_beams": 3}):
        expected = generate(model, {"input_ids": ids}, **how)
        got = generate(model, {"input_ids": padded, "attention_mask": mask}, **how)
        assert torch.equal(got[:, 3:], expected)


# Patched: identity, training, reload, reversal.


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mistral", "gemma2", "qwen3", "bert", "bart", "t5", "vit", "falcon"]
)
def test_patch_is_the_identity_learns_and_comes_back(family, tmp_path):
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    model.save_pretrained(tmp_path)  # Transformers notes dtype and class in the config of what it saves
    before, state = run(model, inputs), State(model)
    config = HypeConfig() if family not in ("t5", "vit") else HypeConfig(max_length=32)
    patch_model(model, config)
    assert difference(before, run(model, inputs)) <= (1e-5 if family == "falcon" else 0)
    body = {n: p.detach().clone() for n, p in model.named_parameters() if ".hyper." not in n}
    train(model, inputs)
    added = {n: p for n, p in model.named_parameters() if ".hyper." in n}
    assert added and all(p.grad is not None and p.grad.isfinite().all() for p in added.values())
    assert all(p.any() for n, p in added.items() if n.endswith("gate"))
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0
    with torch.no_grad():
        model.load_state_dict(body, strict=False)
    unpatch_model(model)
    fresh = [
        f for f in state.differences(State(model)) if not f.startswith(("model.config.", "model.config"))
    ]
    assert fresh == [] and difference(before, run(model, inputs)) == 0


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("make", [FAMILIES["gpt2"][0], bert], ids=["gpt2", "bert"])
def test_every_parameter_reaches_the_loss_with_its_true_gradient(make, mode):
    """Against finite differences of the loss in float64."""
    model = patch_model(make(), HypeConfig(mu=0.05, tau=4.0), mode=mode).double()
    perturb(model, 0.2)
    inputs = {"input_ids": words(model.config)}

    def loss():
        return model(**inputs)[0].square().mean()

    added = {n: p for n, p in model.named_parameters() if ".hyper." in n}
    assert {n.rsplit(".")[-1] for n in added} == {"log_mu", "log_tau"} | (
        {"gate"} if mode == "blend" else set()
    )
    grads = torch.autograd.grad(loss(), list(added.values()))
    for parameter, grad in zip(added.values(), grads, strict=True):
        for index in range(4):
            with torch.no_grad():
                parameter[index] += 1e-6
                high = loss()
                parameter[index] -= 2e-6
                low = loss()
                parameter[index] += 1e-6
            assert grad[index].item() == pytest.approx(((high - low) / 2e-6).item(), rel=1e-4, abs=1e-9)


def test_chosen_heads_alone_are_changed():
    model = patch_model(llama(num_hidden_layers=1), HypeConfig(**STEEP), heads=[1, 3], mode="replace")
    layer = model.model.layers[0].self_attn.hyper
    q, k, v = (torch.randn(1, h, 9, 8) for h in (4, 2, 2))
    out, _ = layer(HostCall(q, k, v, 0.3, True, Options(is_causal=True)))
    plain = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.3, enable_gqa=True
    )
    moved = (out - plain).abs().amax((0, 2, 3)) > 1e-3
    assert moved.tolist() == [False, True, False, True]


def test_it_supplies_positions_where_there_are_none():
    """Without positions a decoder cannot tell the order of what it has read; with HyPE it can."""
    config = hf.SmolLM3Config(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, no_rope_layers=[0], use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.SmolLM3ForCausalLM(config).eval()
    ids = ids_of(model)
    turned = torch.cat([ids[:, :8].flip(1), ids[:, 8:]], 1)

    def seen():
        return (logits(model, input_ids=ids) - logits(model, input_ids=turned))[:, -1].abs().max()

    assert seen() < 1e-5
    patch_model(model, HypeConfig(max_length=16), mode="replace")
    assert seen() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    model = steep("llama")
    ids = words(model.config, length=300)
    exact = logits(model, input_ids=ids)
    model = model.to(dtype)
    got = logits(model, input_ids=ids)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), exact, atol=2e-2, rtol=0)
    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for n, p in model.named_parameters() if ".hyper." in n)


def test_under_autocast_the_columns_stay_float32():
    model = patch_model(llama(), HypeConfig(max_length=512), mode="replace")
    ids = words(model.config, length=400)
    exact = logits(model, input_ids=ids, use_cache=False)
    with torch.autocast("cpu", torch.bfloat16):
        got = logits(model, input_ids=ids, use_cache=False)
    torch.testing.assert_close(got.float(), exact, atol=3e-2, rtol=0)


def test_patched_models_compile_into_one_graph_and_export():
    """Positions come out of the mask without a look at its values."""
    torch._dynamo.reset()
    model = patch_model(llama(num_hidden_layers=1), HypeConfig(max_length=64))
    perturb(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for inputs in (FAMILIES["llama"][1](), {"input_ids": ids_of(model, length=17)}):
        inputs["use_cache"] = False
        assert difference(run(model, inputs), run(compiled, inputs)) <= 1e-5
    length = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}, "use_cache": None}
    given = {"input_ids": ids_of(model), "use_cache": False}
    exported = torch.export.export(model, (), given, dynamic_shapes=length).module()
    assert difference(run(model, inputs), run(exported, inputs)) <= 1e-5


# Beside other mechanisms.

SCORES = {
    "cone": (ha.ConeConfig(), cone_scores),
    "hyperbolic": (ha.HyperbolicConfig(aggregation="mean"), hyperbolic_scores),
}


@pytest.mark.parametrize("mode", ["blend", "replace"])
@pytest.mark.parametrize("other", SCORES)
@pytest.mark.parametrize("causal", [False, True], ids=["cosh", "sinh"])
def test_it_is_added_to_any_score(other, mode, causal):
    config, scores = SCORES[other]
    host = Host("host", heads=4, kv_heads=2, is_causal=causal, is_cross=False, layer_index=0)
    hyper = Hyper(ha.HyperAttnConfig([config, HypeConfig(**STEEP)], mode=mode), host)
    gates = [0.7, 0.4]
    with torch.no_grad():
        for layer, gate in zip(hyper.layers(), gates, strict=True):
            if mode == "blend":
                layer.gate.fill_(gate)
    q, k, v = (torch.randn(2, h, 7, 6) for h in (4, 2, 2))
    out, _ = hyper(HostCall(q, k, v, 0.3, causal, Options(is_causal=causal)))
    bias = hype_bias(torch.arange(7), torch.arange(7), mu=STEEP["mu"], tau=torch.tensor(STEEP["tau"]),
                     form="sinh" if causal else "cosh")  # fmt: skip
    total = scores(q, k) + bias
    if mode == "blend":
        total = q @ k.repeat_interleave(2, 1).mT * 0.3 + gates[0] * scores(q, k) + gates[1] * bias
    if causal:
        total = total.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    expected = total.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_key_tied_attention_takes_its_columns(family):
    """With everything near it is HyPE alone; with windows, caches and padding make no difference."""
    near, tied = (
        patch_model(
            model_of(family, "eager"), HypeConfig(**STEEP), ha.HsaConfig(windows=(2,), **how), mode="replace"
        )
        for how in (dict(near=100), dict(near=2, sinks=1, refine_top_k=1))
    )
    inputs = {"input_ids": ids_of(near)}
    torch.testing.assert_close(logits(near, **inputs), logits(steep(family), **inputs), atol=1e-5, rtol=0)
    assert (logits(tied, **inputs) - logits(near, **inputs)).abs().max() > 1e-4
    plain = generate(tied, inputs, use_cache=False)
    assert torch.equal(generate(tied, inputs), plain)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), inputs["input_ids"]], 1)
    mask = (torch.arange(12) >= 3).long().repeat(2, 1)
    assert torch.equal(generate(tied, {"input_ids": padded, "attention_mask": mask})[:, 3:], plain)


def test_softcap_and_sinks_come_before_the_bias_and_stay():
    """gemma2's cap is on the dot product alone; gpt_oss's sinks take part in the softmax."""
    host = Host("host", heads=4, kv_heads=4, is_causal=True, is_cross=False, layer_index=0)
    hyper = Hyper(ha.HyperAttnConfig([HypeConfig(**STEEP)], mode="replace"), host)
    q, k, v = (torch.randn(2, 4, 40, 6) for _ in range(3))
    sinks = torch.randn(4)
    out, _ = hyper(HostCall(q, k, v, 2.0, True, Options(is_causal=True, softcap=1.5, sinks=sinks)))
    bias = hype_bias(
        torch.arange(40), torch.arange(40), mu=STEEP["mu"], tau=torch.tensor(STEEP["tau"]), form="sinh"
    )
    total = 1.5 * torch.tanh(2.0 * q @ k.mT / 1.5) + bias
    total = total.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    total = torch.cat([total, sinks[:, None, None].expand(2, 4, 40, 1)], -1)
    torch.testing.assert_close(out, total.softmax(-1)[..., :-1] @ v, atol=1e-5, rtol=0)


# What is refused.

BAD = {
    "mu zero": ({"mu": 0.0}, ["HypeConfig.mu=0.0", "above 0"]),
    "mu negative in one head": ({"mu": (0.1, -0.1)}, ["HypeConfig.mu", "-0.1", "above 0"]),
    "tau negative": ({"tau": -1.0}, ["HypeConfig.tau=-1.0", "from 0"]),
    "tau infinite": ({"tau": float("inf")}, ["HypeConfig.tau=inf", "finite"]),
    "max_length zero": ({"max_length": 0}, ["HypeConfig.max_length=0", "above 0"]),
    "max_length negative": ({"max_length": -8}, ["HypeConfig.max_length=-8", "above 0"]),
    "max_length a fraction": ({"max_length": 8.5}, ["HypeConfig.max_length=8.5", "int"]),
    "unknown form": ({"form": "tanh"}, ["HypeConfig.form='tanh'", "'sinh', 'cosh'"]),
    "unknown slopes": ({"slopes": "steep"}, ["HypeConfig.slopes='steep'", "'alibi'"]),
    "slopes with a word": ({"slopes": (1.0, "x")}, ["HypeConfig.slopes", "'x'", "finite numbers"]),
    "no slopes": ({"slopes": ()}, ["HypeConfig.slopes=()", "at least one"]),
    "mu and max_length": ({"mu": 0.1, "max_length": 10}, ["HypeConfig.max_length=10", "mu"]),
    "tau and slopes": ({"tau": 1.0, "slopes": (1.0, 2.0)}, ["HypeConfig.slopes", "tau"]),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_configs_are_refused_in_one_line(what):
    changes, fragments = BAD[what]
    with pytest.raises(ValueError) as caught:
        HypeConfig(**changes)
    message = str(caught.value)
    assert "\n" not in message and all(f in message for f in fragments), message


@pytest.mark.parametrize("name", ["mu", "tau", "slopes"])
def test_numbers_for_another_count_of_heads_are_refused(name):
    state = State(model := llama())
    with pytest.raises(
        ValueError, match=f"HypeConfig.{name} has 3 numbers; allowed: one, or one for each of the 4"
    ):
        patch_model(model, HypeConfig(**{name: (1.0, 2.0, 3.0)}))
    assert state.differences(State(model)) == []


def test_configs_are_plain_json():
    config = ha.HyperAttnConfig([HypeConfig(slopes=(0.5, 0.25), max_length=100, form="cosh")])
    again = ha.HyperAttnConfig.from_dict(copy.deepcopy(config.to_dict()))
    assert again == config
    mu, tau = again.mechanisms[0].start("cosh", 2)
    assert mu == (0.01,) and tau == pytest.approx((100.0, 50.0))


UNEQUAL = {"is_causal": False, "key": torch.zeros(1, 4, 11, 8), "value": torch.zeros(1, 4, 11, 8)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"keywords": {"indices": torch.zeros(1, 9, 2)}}, "in that.host, where an indexer chooses the keys"),
        (UNEQUAL, "9 queries among 11 keys in that.host"),
    ],
    ids=["indexer", "two lengths"],
)
def test_calls_without_an_order_are_refused(changes, message):
    host = Host("that.host", heads=4, kv_heads=4, is_causal=True, is_cross=False, layer_index=0)
    hyper = Hyper(ha.HyperAttnConfig([HypeConfig(mu=0.1)], mode="replace"), host)
    x = torch.randn(1, 4, 9, 8)
    call = dict(query=x, key=x, value=x, scale=1.0, is_causal=True, options=Options(), keywords={}) | changes
    with pytest.raises(ValueError, match=message):
        hyper(HostCall(**call))
