"""Compressed collaborative heads: exactness, what is replaced and saved, caches, training, and what goes wrong."""

import copy
import json

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import hf_hyperattn as ha
from hf_hyperattn.config import HyperAttnConfig
from hf_hyperattn.integration import convert
from hf_hyperattn.integration.architectures.collaborative import conversion
from hf_hyperattn.integration.architectures.collaborative.projections import SharedProjection
from hf_hyperattn.integration.attention.hyper import patched_hosts
from tests.integration.architectures.collaborative import SERVED, WIDTH, make, quiet, shared
from tests.integration.models import State, difference, rounding, run

FULL = ha.CollaborativeConfig(rank=WIDTH)


def without_dimensions(model):
    """The model with one dimension less in every head's query weights: rank H(d-1), with all biases as they were."""
    for _, host in [
        (n, m) for n, m in model.named_modules() if conversion.find_projections(m) is not None
    ]:
        found = conversion.find_projections(host)
        with torch.no_grad():
            found.query.view(4, 8, -1)[:, -1] = 0
    return model


@pytest.mark.parametrize("family", SERVED)
def test_full_rank_is_exact(family):
    model, inputs = make(family)
    before = run(model, inputs)
    with quiet():
        assert convert(model, FULL) is model
    assert difference(before, run(model, inputs)) <= rounding(before)


@pytest.mark.parametrize("family", SERVED)
def test_heads_of_lower_rank_are_found_exactly_with_their_content_bias(family):
    model, inputs = make(family)
    before = run(without_dimensions(model), inputs)
    with quiet():
        convert(model, ha.CollaborativeConfig(rank=28))
    assert difference(before, run(model, inputs)) <= rounding(before)


def test_logits_are_the_formula():
    model, inputs = make("bert")
    host = model.encoder.layer[0].attention.self
    old = copy.deepcopy(host)
    with quiet():
        convert(model, ha.CollaborativeConfig(rank=12, steps=5))
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(2))
    mixing = host.hyper.collaborative.mixing.double()
    a, b = host.query.shared.weight.double(), host.key.shared.weight.double()
    y = x[0].double()
    logits = torch.zeros(4, 6, 6, dtype=torch.float64)
    for h in range(4):
        rows = slice(8 * h, 8 * h + 8)
        shared_part = y @ a.T @ torch.diag(mixing[h]) @ b @ y.T
        bias = old.query.bias[rows].double() @ old.key.weight[rows].double()
        logits[h] = (shared_part + (y @ bias)[None, :]) / 8**0.5
    values = (
        (y @ old.value.weight.double().T + old.value.bias.double())
        .unflatten(-1, (4, 8))
        .transpose(0, 1)
    )
    expected = (logits.softmax(-1) @ values).transpose(0, 1).flatten(1)
    with torch.no_grad():
        got = host(x)[0][0]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", SERVED)
def test_comes_back_from_a_checkpoint_without_the_old_parameters(family, tmp_path):
    model, inputs = make(family)
    model.save_pretrained(tmp_path / "before")
    with quiet():
        convert(model, ha.CollaborativeConfig(rank=12, steps=5))
    model.save_pretrained(tmp_path / "after")
    again, report = type(model).from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert difference(run(model, inputs), run(again.eval(), inputs)) == 0.0
    sizes = [(tmp_path / d / "model.safetensors").stat().st_size for d in ("before", "after")]
    assert sizes[1] < sizes[0]
    named = load_file(tmp_path / "after" / "model.safetensors")
    assert any(n.endswith("shared.weight") and t.shape[0] == 12 for n, t in named.items())
    again.save_pretrained(tmp_path / "again")
    third = type(model).from_pretrained(tmp_path / "again").eval()
    assert difference(run(model, inputs), run(third, inputs)) == 0.0


def test_a_bare_checkpoint_loads_with_a_head_and_the_other_way(tmp_path):
    model, inputs = shared("bert")
    model.save_pretrained(tmp_path)
    headed = hf.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    assert difference(run(model, inputs), run(headed.bert, inputs)) == 0.0
    headed.save_pretrained(tmp_path / "headed")
    assert (
        difference(
            run(model, inputs),
            run(hf.AutoModel.from_pretrained(tmp_path / "headed").eval(), inputs),
        )
        == 0
    )


@pytest.mark.parametrize("family", ["gpt2", "opt", "bart", "t5", "whisper"])
def test_generation_with_a_cache_equals_without(family):
    model, inputs = shared(family)
    given = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
    how = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    plain = model.generate(**given, use_cache=False, **how)
    assert torch.equal(model.generate(**given, **how), plain)
    if family != "whisper":  # its generate takes the cache's length from elsewhere
        static = dict(cache_implementation="static", disable_compile=True)
        assert torch.equal(model.generate(**given, **static, **how), plain)
        beams = dict(num_beams=2, use_cache=False, **how)
        assert torch.equal(
            model.generate(**given, **beams),
            model.generate(**given, **beams | dict(use_cache=True)),
        )


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_left_padding_changes_nothing(family):
    model, inputs = shared(family)
    ids = inputs["input_ids"][1:]
    padded = torch.cat([torch.full((1, 3), 5), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        got = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
        torch.testing.assert_close(got, model(input_ids=ids).logits, atol=1e-5, rtol=0)


def test_parameters_are_really_gone():
    model, _ = make("bert")
    before = sum(p.numel() for p in model.parameters())
    with quiet():
        parts = conversion.select_parts(
            model, HyperAttnConfig((ha.CollaborativeConfig(rank=12),), mode="replace")
        )[1]
        convert(model, ha.CollaborativeConfig(rank=12, steps=2))
    after = sum(p.numel() for p in model.parameters())
    assert before - after == sum(a - b for a, b in (part.parameters for part in parts))
    # a layer: 2·32·32 weights and 2·32 biases; now 2·12·32, mixing 4·12, content bias 4·32
    assert before - after == 4 * (2048 + 64 - 768 - 48 - 128)


def test_errors_and_size_are_reported_before_anything_is_replaced(monkeypatch):
    model, _ = make("bert")
    state, said = State(model), []

    def listen(text):
        said.append((text, not state.differences(State(model))))

    monkeypatch.setattr(conversion.logger, "warning", listen)
    convert(model, ha.CollaborativeConfig(rank=12, steps=5))
    ((text, untouched),) = said
    assert untouched and text.count("error of weights 0.") == 4 and "2,112 -> 944" in text
    assert "layer.3" in text and "MB" in text


@pytest.mark.parametrize("moment", ["first layer", "last layer", "attach", "swap"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_conversion_that_ends_early_leaves_the_model_as_it_was(monkeypatch, moment, error):
    model, inputs = make("bert")
    before, state = run(model, inputs), State(model)
    calls, decompose, attach = [], conversion.decompose, conversion.attach_hypers

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == (1 if moment == "first layer" else 4):
            raise error("stop")
        return decompose(*args, **kwargs)

    def attached_and_out(*args, **kwargs):
        attach(*args, **kwargs)
        raise error("stop")

    class Breaks(dict):
        def items(self):
            yield from [next(iter(super().items()))]
            raise error("stop")

    if "layer" in moment:
        monkeypatch.setattr(conversion, "decompose", failing)
    elif moment == "attach":
        monkeypatch.setattr(conversion, "attach_hypers", attached_and_out)
    else:
        filled = conversion.build_filled
        monkeypatch.setattr(conversion, "build_filled", lambda *args: Breaks(filled(*args)))
    with quiet(), pytest.raises(error):
        convert(model, ha.CollaborativeConfig(rank=12, steps=3), keep_original=True)
    assert not state.differences(State(model)) and difference(before, run(model, inputs)) == 0.0
    monkeypatch.undo()
    with quiet():
        convert(model, FULL)


@pytest.mark.parametrize("family", SERVED)
def test_the_original_comes_back_where_it_was_kept(family):
    model, inputs = make(family)
    before, state = run(model, inputs), State(model)
    with quiet():
        convert(model, ha.CollaborativeConfig(rank=12, steps=2), keep_original=True)
    assert difference(before, run(model, inputs)) > 0
    assert ha.unpatch_model(model) is model
    assert not state.differences(State(model)) and difference(before, run(model, inputs)) == 0.0


def test_the_original_comes_back_in_the_models_dtype():
    model, _ = shared("bert", keep_original=True)
    ha.unpatch_model(model.to(torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_what_was_kept_is_not_saved(tmp_path):
    model, _ = shared("bert", keep_original=True)
    model.save_pretrained(tmp_path)
    assert not [
        n for n in load_file(tmp_path / "model.safetensors") if n.endswith("self.query.weight")
    ]
    again = hf.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="keep_original=True"):
        ha.unpatch_model(again)
    with pytest.raises(ValueError, match="keep_original=True"):
        ha.unpatch_model(shared("bert")[0])


def test_copies_are_converted_by_themselves():
    model, inputs = shared("bert", keep_original=True)
    other = copy.deepcopy(model)
    assert difference(run(model, inputs), run(other, inputs)) == 0.0
    ha.unpatch_model(other)
    assert not list(patched_hosts(other)) and len(list(patched_hosts(model))) == 4


def test_other_implementations_run_beneath(tmp_path):
    """They are what unconverted layers run; a converted layer has no other attention left."""
    model, inputs = shared("bert")
    expected = run(model, inputs)
    with pytest.raises(ValueError, match="'cone' cannot run beneath"):
        model.set_attn_implementation("cone")
    model.set_attn_implementation("eager")
    assert difference(expected, run(model, inputs)) <= 1e-6
    model.save_pretrained(tmp_path)
    again = hf.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert difference(expected, run(again, inputs)) <= 1e-6


def test_converted_twice_or_patched_after_is_refused():
    model, _ = shared("bert")
    with pytest.raises(ValueError, match="converted already, by collaborative"):
        convert(model, FULL)
    with pytest.raises(ValueError, match="patched already"):
        ha.patch_model(model, ha.HypeConfig())


@pytest.mark.parametrize(
    "rank, allowed", [(33, "1 to 32"), (1000, "1 to 32"), (29, "1 to 28, or 32"), (31, "1 to 28")]
)
def test_ranks_out_of_range_are_refused_with_the_range(rank, allowed):
    model, _ = make("bert")
    state = State(model)
    with pytest.raises(ValueError, match=f"rank={rank} .*allowed: {allowed}"):
        convert(model, ha.CollaborativeConfig(rank=rank))
    assert not state.differences(State(model))


def test_without_biases_every_rank_is_allowed():
    model, inputs = make("t5")
    before = run(model, inputs)
    with quiet():
        convert(model, ha.CollaborativeConfig(rank=31))
    assert 0 < difference(before, run(model, inputs)) < 1


def test_families_and_modules_that_cannot_be_shared_are_refused():
    for family, match in (
        ("deberta-v2", "not known"),
        ("bloom", "not known"),
        ("mpt", "not known"),
    ):
        model, _ = make(family)
        state = State(model)
        with pytest.raises(ValueError, match=match):
            convert(model, FULL)
        assert not state.differences(State(model))
    model, _ = make("bert")
    model.encoder.layer[1].attention.self.key = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(ValueError, match="no plain projections .*layer.1"):
        convert(model, FULL)
    with pytest.raises(ValueError, match="heads=None"):
        convert(make("bert")[0], HyperAttnConfig((FULL,), heads=[0]))
    with torch.device("meta"):
        empty = hf.BertModel(make("bert")[0].config)
    with pytest.raises(ValueError, match="in memory"):
        convert(empty, FULL)


def test_some_layers_and_ranks_of_their_own(tmp_path):
    model, inputs = make("bert")
    own = {"encoder.layer.2.attention.self": (ha.CollaborativeConfig(rank=20, steps=3),)}
    config = HyperAttnConfig(
        (ha.CollaborativeConfig(rank=8, steps=3),), layers=[1, 2], overrides=own
    )
    with quiet():
        convert(model, config)
    ranks = [m.shared.out_features for m in model.modules() if isinstance(m, SharedProjection)]
    assert ranks == [8, 8, 20, 20]
    model.save_pretrained(tmp_path)
    again = hf.AutoModel.from_pretrained(tmp_path).eval()
    assert difference(run(model, inputs), run(again, inputs)) == 0.0


def test_other_mechanisms_beside_it_in_one_checkpoint(tmp_path):
    model, inputs = make("gpt2")
    before = run(model, inputs)
    config = HyperAttnConfig((FULL, ha.HypeConfig(max_length=64), ha.HeadFusionConfig()))
    with quiet():
        convert(model, config, keep_original=True)
    assert difference(before, run(model, inputs)) <= 1e-5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name and not name.endswith("mixing"):
                parameter.add_(0.3)
    learned = run(model, inputs)
    assert difference(before, learned) > 1e-4
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert difference(learned, run(again, inputs)) == 0.0
    ha.unpatch_model(model)
    assert difference(before, run(model, inputs)) == 0.0


def test_cross_attention_is_shared_where_asked():
    model, inputs = make("bart")
    before = run(without_dimensions(model), inputs)
    with quiet():
        rank = ha.CollaborativeConfig(rank=28)
        convert(model, HyperAttnConfig((rank,), mode="replace", include_cross_attention=True))
    assert len(list(patched_hosts(model))) == 6
    assert difference(before, run(model, inputs)) <= 1e-5


def test_everything_learns_and_lora_reaches_the_new_projections(tmp_path):
    model, inputs = shared("bert")
    model.train()
    model(**inputs)[0].square().mean().backward()
    for name, parameter in model.named_parameters():
        if "shared" in name or "content" in name or "mixing" in name:
            assert (
                parameter.grad is not None
                and parameter.grad.isfinite().all()
                and parameter.grad.any()
            ), name
    model.eval()
    before = run(model, inputs)
    lora = LoraConfig(target_modules=["query.shared", "key.shared"], modules_to_save=["hyper"])
    adapted = get_peft_model(model, lora)
    assert difference(before, run(adapted, inputs)) <= 1e-6
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or ("modules_to_save" in name and "mixing" in name):
                parameter.add_(0.1)
    learned = run(adapted, inputs)
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(shared("bert")[0], tmp_path).eval()
    assert difference(learned, run(again, inputs)) <= 1e-6
    merged = again.merge_and_unload()
    assert difference(learned, run(merged, inputs)) <= 1e-5


def test_frozen_projections_stay_frozen():
    model, _ = make("bert")
    model.requires_grad_(False)
    with quiet():
        convert(model, FULL)
    names = {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad}
    assert names == {"collaborative"}  # what is new learns


def test_the_same_conversion_gives_the_same_model():
    one, same = (shared("bert", rank=9)[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[n], same[n]) for n in one)


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart"])
def test_examples_make_it_better_where_they_are(family):
    errors = []
    for fitted in (False, True):
        model, inputs = make(family)
        before = run(model, inputs)
        model.train()
        with quiet():
            examples = [inputs] if fitted else None
            convert(model, ha.CollaborativeConfig(rank=8, steps=30), examples=examples)
        assert model.training and not any(m._forward_pre_hooks for m in model.modules())
        after = run(model.eval(), inputs)
        errors.append(sum((before[n] - after[n]).square().mean().item() for n in before))
    assert errors[1] < errors[0]


def test_examples_must_reach_every_host():
    model, inputs = make("clip")
    state = State(model)
    with pytest.raises(Exception):  # noqa: B017  whatever the model says of half a call
        convert(
            model, ha.CollaborativeConfig(rank=8), examples=[{"input_ids": inputs["input_ids"]}]
        )
    assert not state.differences(State(model))


def test_half_precision_checkpoints_are_shared_in_float64():
    model, inputs = make("bert")
    exact = run(model, inputs)
    model.to(torch.bfloat16)
    stock = difference(exact, run(model, inputs))
    with quiet():
        convert(model, FULL)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert difference(exact, run(model, inputs)) <= 2 * stock + 1e-3


@pytest.mark.slow
def test_compiles_whole():
    model, inputs = shared("bert")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert difference(run(model, inputs), run(compiled, inputs)) <= 1e-5


def test_weights_of_attention_are_those_of_its_logits():
    model, inputs = shared("bert")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    assert len(weights) == 4 and all(w.shape == (2, 4, 11, 11) for w in weights)
    assert all(torch.allclose(w.sum(-1), torch.ones(2, 4, 11), atol=1e-5) for w in weights)


def test_the_record_says_what_was_done(tmp_path):
    model, _ = shared("bert")
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["hyperattn"]
    assert record["mechanisms"] == [
        {"mechanism": "collaborative", "rank": 12, "steps": 20, "seed": 0}
    ]
    assert record["mode"] == "replace" and len(record["hosts"]) == 4
    description = ha.describe(model)
    assert description["patched"] == 4 and description["hosts"][0]["mechanisms"] == [
        "collaborative"
    ]


def test_a_model_built_from_the_config_can_be_trained():
    config = shared("t5")[0].config
    model = hf.T5ForConditionalGeneration(config)
    assert all(p.isfinite().all() and p.abs().max() < 50 for p in model.parameters())
    ids = torch.randint(5, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    assert model(input_ids=ids, labels=ids).loss.isfinite()
