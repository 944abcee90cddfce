"""`model(..., hierarchy=...)` reaches the attention of every family, in every way in which a model is run."""

import copy
import pickle

import pytest
import torch
import transformers as hf
from peft import get_peft_model

import hf_hyperattn as ha
from hf_hyperattn.hierarchy import Hierarchy, as_hierarchy
from hf_hyperattn.integration.attention.running_call import ignores_hierarchy
from hf_hyperattn.integration.attention.stock import OURS
from tests.hierarchy import toy_listener
from tests.hierarchy.toy_listener import CALLS, ToyListenerConfig
from tests.integration.models import (
    FAMILIES,
    State,
    bert,
    difference,
    llama,
    perturb,
    run,
    text_inputs,
)
from tests.model_patches.families import MODELS

#: Families whose hosts attend to several different sequences, or to pooled keys, which no one hierarchy fits.
SEVERAL = {
    "cvt",
    "glpn",
    "got_ocr2-vision",
    "mobilevit",
    "pvt",
    "pvt_v2",
    "pvt_v2-linear",
    "sam-vision",
    "sam_hq-vision",
    "timesformer",
    "blip-caption",
    "canine",
    "lxmert",
    "perceiver",
    "vitdet",
}
CASES = {name: lambda c=c: (c[0](), c[1]()) for name, c in FAMILIES.items()} | {
    f"served {name}": c for name, c in MODELS.items() if name not in SEVERAL
}


@pytest.fixture(autouse=True)
def listener():
    toy_listener.register_listener()
    yield
    toy_listener.forget_listener()
    OURS.discard(toy_listener.NAME)


def patched(make, seed=0):
    torch.manual_seed(seed)
    model = ha.patch_model(make(), ToyListenerConfig())
    perturb(model, 3.0)
    CALLS.clear()
    return model


def random_ids(batch=2, length=11, levels=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, (batch, length, levels), generator=generator)


def heard():
    """What every call since the last time heard."""
    found = [h for h, *_ in CALLS]
    CALLS.clear()
    return found


@pytest.mark.parametrize("family", CASES)
def test_every_family_hears_it(family):
    model, inputs = CASES[family]()
    ha.patch_model(model, ToyListenerConfig())
    CALLS.clear()
    model(**inputs)
    ignoring = {
        m.hyper.toy_listener
        for m in model.modules()
        if "hyper" in m._modules and ignores_hierarchy(m)
    }
    lengths = {keys for _, keys, layer in CALLS if layer not in ignoring}
    assert len(lengths) == 1 or family == "served blip"
    for length in sorted(lengths):
        CALLS.clear()
        hierarchy = Hierarchy.windows(length, (2,))
        model(**inputs, hierarchy=hierarchy)
        assert all((h is None) == (layer in ignoring) for h, _, layer in CALLS) and any(heard())
        assert all(h is hierarchy for h in heard() if h is not None)
    model(**inputs)
    assert not any(h is not None for h in heard())


@pytest.mark.parametrize("family", ["llama", "bert", "bloom", "deberta-v2", "mpt"])
def test_it_changes_the_output_and_forms_agree(family):
    model, inputs = FAMILIES[family]
    model, inputs = patched(model), inputs()
    ids = random_ids()
    plain, tensor = run(model, inputs), run(model, inputs | {"hierarchy": ids})
    assert difference(plain, tensor) > 1e-3
    assert difference(tensor, run(model, inputs | {"hierarchy": Hierarchy.from_ids(ids)})) == 0
    assert difference(plain, run(model, inputs)) == 0


def generated(model, **how):
    inputs = text_inputs()
    kept = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0) | how
    return model.generate(**inputs, **kept)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gptj", "mpt"])
@pytest.mark.parametrize("form", ["tensor", "trees", "windows"])
def test_generation_with_a_cache_equals_without(family, form):
    model = patched(FAMILIES[family][0])
    mask = text_inputs()["attention_mask"]
    hierarchy = {
        "tensor": random_ids(),
        "trees": Hierarchy.from_ids(random_ids()),
        "windows": Hierarchy.windows(11, (2, 4), mask),
    }[form]
    plain = generated(model, use_cache=False)
    heard()
    expected = generated(model, hierarchy=hierarchy, use_cache=False)
    assert all(h is not None for h in heard())
    assert torch.equal(generated(model, hierarchy=hierarchy), expected)
    if family == "llama":
        static = generated(
            model, hierarchy=hierarchy, cache_implementation="static", disable_compile=True
        )
        assert torch.equal(static, expected)
        assert not torch.equal(plain, expected)
    assert all(h is not None for h in heard())


def test_what_generation_computes_is_one_full_forward_pass():
    """New tokens are siblings of the last: the same tree over the whole text gives the same logits."""
    model = patched(llama)
    ids = random_ids()
    for hierarchy in (ids, Hierarchy.windows(11, (2, 4), text_inputs()["attention_mask"])):
        out = generated(
            model, hierarchy=hierarchy, output_logits=True, return_dict_in_generate=True
        )
        whole = as_hierarchy(hierarchy).fitted(2, 15)
        mask = torch.cat([text_inputs()["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
        inputs = dict(input_ids=out.sequences[:, :15], attention_mask=mask)
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(**inputs, hierarchy=whole).logits[:, -5:]
        torch.testing.assert_close(logits, torch.stack(out.logits, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        dict(num_beams=3),
        dict(num_beams=4, num_return_sequences=2),
        dict(do_sample=True, num_return_sequences=3),
        dict(num_beams=2, do_sample=True),
    ],
    ids=str,
)
def test_beams_and_samples(how):
    model = patched(llama)
    ids = random_ids()
    found = {}
    for cache in (False, True):
        for form, hierarchy in (("tensor", ids), ("trees", Hierarchy.from_ids(ids))):
            torch.manual_seed(1)
            found[cache, form] = generated(model, hierarchy=hierarchy, use_cache=cache, **how)
    assert all(torch.equal(found[True, "tensor"], other) for other in found.values())
    assert all(h is not None for h in heard())


@pytest.mark.parametrize("assistant", ["patched", "plain"])
def test_assisted_decoding_equals_greedy(assistant):
    model = patched(llama)
    helper = patched(llama, 1) if assistant == "patched" else llama()
    ids, mask = text_inputs()["input_ids"][1:], text_inputs()["attention_mask"][1:]
    how = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, hierarchy=random_ids(1))
    greedy = model.generate(ids, attention_mask=mask, **how)
    heard()
    assert torch.equal(
        model.generate(ids, attention_mask=mask, assistant_model=helper, **how), greedy
    )
    assert all(h is not None for h in heard())
    assert torch.equal(
        model.generate(ids, attention_mask=mask, prompt_lookup_num_tokens=2, **how), greedy
    )


@pytest.mark.parametrize("family", ["bart", "t5", "served fsmt"])
def test_encoder_decoders_hear_it_in_the_encoder(family):
    model, inputs = CASES[family]()
    ha.patch_model(model, ToyListenerConfig())
    perturb(model)
    ids = inputs["input_ids"]
    CALLS.clear()
    hierarchy = random_ids(len(ids), ids.shape[1])
    out = model.generate(ids, hierarchy=hierarchy, max_new_tokens=4, num_beams=2, do_sample=False)
    lengths = {keys for h, keys, _ in CALLS if h is not None}
    assert lengths == {ids.shape[1]}
    if not isinstance(model.get_decoder(), hf.PreTrainedModel):
        return
    with pytest.raises(ValueError, match="is a part that hierarchy= is not about"):
        model.get_decoder()(input_ids=out, hierarchy=hierarchy)


def gradients(model, inputs, **forward):
    model.zero_grad()
    model.train()
    output = model(**inputs, **forward)
    output[0].square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "bert", "bloom", "gptj", "mpt", "deberta-v2", "t5"])
def test_gradient_checkpointing_recomputes_with_it(family, reentrant):
    model, inputs = FAMILIES[family]
    model, inputs = patched(model), inputs()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    hierarchy = random_ids()
    inputs |= {} if family in ("bert", "deberta-v2") else {"use_cache": False}
    plain, expected = gradients(model, inputs), gradients(model, inputs, hierarchy=hierarchy)
    assert difference(plain, {n: expected[n] for n in plain}) > 1e-6
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    heard()
    got = gradients(model, inputs, hierarchy=hierarchy)
    calls = len(heard())
    assert got.keys() == expected.keys() and difference(got, expected) <= 1e-6
    gradients(model, inputs)
    assert len(CALLS) == calls and not any(h is not None for h in heard())


def test_checkpointing_out_of_reach_is_refused():
    """A layer that somebody else computes again in the backward pass must not do so without its hierarchy."""
    from torch.utils.checkpoint import checkpoint

    model = patched(llama)
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, **kwargs
    )
    with pytest.raises(RuntimeError, match="without the hierarchy of its call"):
        gradients(model, text_inputs() | {"use_cache": False}, hierarchy=random_ids())


def test_checkpoint_wrappers_of_fsdp_carry_it():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    model = patched(llama)
    inputs, hierarchy = text_inputs() | {"use_cache": False}, random_ids()
    expected = gradients(model, inputs, hierarchy=hierarchy)
    layer = type(model.model.layers[0])
    wrapper.apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, layer))
    got = gradients(model, inputs, hierarchy=hierarchy)
    assert (
        difference(
            {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in got.items()}, expected
        )
        <= 1e-6
    )


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        ids = text_inputs()["input_ids"][index % 2]
        return dict(input_ids=ids, labels=ids, hierarchy=random_ids(1)[0], unused=1)


@pytest.mark.parametrize("peft", [False, True])
def test_the_trainer_keeps_the_column(tmp_path, peft):
    model = patched(llama)
    model = get_peft_model(model, ha.lora_config(model)) if peft else model
    arguments = hf.TrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    assert arguments.remove_unused_columns
    hf.Trainer(model, arguments, train_dataset=Texts()).train()
    found = heard()
    assert found and all(h.shape[1:] == (11, 2) for h in found)
    if peft:
        model.generate(**text_inputs(), hierarchy=random_ids(), max_new_tokens=2)
        assert all(h is not None for h in heard())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_compiled_whole_without_a_break(family):
    model, inputs = FAMILIES[family]
    model, inputs = patched(model), inputs()
    expected = run(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs |= {} if family == "bert" else {"use_cache": False}
    assert difference(run(compiled, inputs), expected) <= 1e-5
    mask = inputs["attention_mask"]
    for hierarchy in (
        Hierarchy.windows(11, (2, 4), mask),
        random_ids(),
    ):  # the second may break the graph
        expected = run(model, inputs | {"hierarchy": hierarchy})
        torch.compiler.reset()
        loose = torch.compile(model, backend="aot_eager")
        assert difference(run(loose, inputs | {"hierarchy": hierarchy}), expected) <= 1e-5


@pytest.mark.slow
def test_compiled_layers_see_a_new_hierarchy():
    model = patched(llama)
    inputs, hierarchies = text_inputs(), (None, random_ids(), random_ids(seed=1), None)
    expected = [run(model, inputs | {"hierarchy": h}) for h in hierarchies]
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    for hierarchy, want in zip(hierarchies, expected, strict=True):
        assert difference(run(model, inputs | {"hierarchy": hierarchy}), want) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "bart", "clip", "bloom", "vit"])
def test_unpatching_gives_back_the_class(family, tmp_path):
    model, inputs = FAMILIES[family]
    model, inputs = model(), inputs()
    run(model, inputs)
    state, stock = State(model), type(model)
    ha.patch_model(model, ToyListenerConfig())
    assert type(model) is not stock and isinstance(model, stock) and str(type(model)) == str(stock)
    run(model, inputs)
    model.save_pretrained(tmp_path)
    assert model.config.architectures == [stock.__name__]
    ha.unpatch_model(model)
    state.facts.pop("model.config", None)
    found = [
        d for d in state.differences(State(model)) if "architectures" not in d and "dtype" not in d
    ]
    assert type(model) is stock and [d for d in found if "config" not in d] == []


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_reloaded_and_copied_models_take_it(family, tmp_path):
    model, inputs = FAMILIES[family]
    model, inputs = patched(model), inputs()
    inputs["hierarchy"] = random_ids()
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    copies = {
        "reloaded": type(model).from_pretrained(tmp_path),
        "stock class": getattr(hf, type(model).__name__).from_pretrained(tmp_path),
        "deepcopy": copy.deepcopy(model),
    }
    for other in copies.values():
        assert difference(run(other, inputs), expected) == 0
        ha.unpatch_model(other)
        assert type(other) is getattr(hf, type(model).__name__)


def test_pickle():
    model = ha.patch_model(llama(), ToyListenerConfig())
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    inputs = text_inputs() | {"hierarchy": random_ids()}
    assert difference(run(again, inputs), run(model, inputs)) == 0


def test_hooks_of_accelerate_keep_working():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model = llama()
    add_hook_to_module(model, ModelHook())
    add_hook_to_module(model.model, ModelHook())
    state = State(model)
    ha.patch_model(model, ToyListenerConfig())
    perturb(model, 3.0)
    CALLS.clear()
    generated(model, hierarchy=random_ids())
    assert CALLS and all(h is not None for h in heard())
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []
    ha.patch_model(model, ToyListenerConfig())
    remove_hook_from_module(model, recurse=True)
    heard()
    generated(model, hierarchy=random_ids())
    assert CALLS and all(h is not None for h in heard())
    ha.unpatch_model(model)
    with pytest.raises(ValueError, match="hierarchy"):
        generated(model, hierarchy=random_ids())


@pytest.mark.parametrize(
    "make", [llama, bert, FAMILIES["bloom"][0]], ids=["llama", "bert", "bloom"]
)
def test_models_used_by_name_take_it(make):
    model = make()
    stock = type(model)
    model.set_attn_implementation(toy_listener.NAME)
    CALLS.clear()
    run(model, text_inputs() | {"hierarchy": random_ids()})
    assert CALLS and all(h is not None for h in heard())
    if model.can_generate():
        generated(model, hierarchy=random_ids())
        assert all(h is not None for h in heard())
    other = hf.AutoModel.from_config(model.config, attn_implementation=toy_listener.NAME)
    other(**text_inputs(), hierarchy=random_ids())
    assert CALLS and all(h is not None for h in heard())
    model.set_attn_implementation("eager")
    assert type(model) is stock


def test_what_is_no_hierarchy_is_refused():
    model, inputs = patched(llama), text_inputs()
    for wrong, message in (
        ([1, 2], "hierarchy is a list; allowed: a Hierarchy, or group ids"),
        (torch.zeros(2, 11), "dtype torch.float32; allowed: integers"),
        (torch.zeros(3, 11, dtype=torch.long), "the hierarchy has 3 rows, the batch 2"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            model(**inputs, hierarchy=wrong)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="the hierarchy covers 9 tokens, attention has 11"):
        patched(bert)(**inputs, hierarchy=random_ids(length=9))
