"""Attention functions of others, beneath a mechanism or around ours: refused by name, or composed."""

import contextlib
import functools
import logging

import pytest
import torch
import transformers as hf
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_hyperattn as ha
from hf_hyperattn.integration.attention.stock import find_own_function
from tests.integration.models import difference, llama, llava, llava_inputs, run, text_inputs

FOREIGN = "test_softmax_of_halves"


def compute_half(module, query, key, value, attention_mask, scaling=None, **keywords):
    """Softmax of half the logits, which is no softmax(scale · q·k)."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sdpa = hf.integrations.sdpa_attention.sdpa_attention_forward
    return sdpa(module, query, key, value, attention_mask, scaling=0.5 * scaling, **keywords)


@pytest.fixture(autouse=True)
def registered():
    """The foreign function, and the registry as it was afterwards."""
    functions, masks = (
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
    )
    AttentionInterface.register(FOREIGN, compute_half)
    AttentionMaskInterface.register(FOREIGN, sdpa_mask)
    yield
    for interface, before in ((AttentionInterface, functions), (AttentionMaskInterface, masks)):
        interface._global_mapping.clear()
        interface._global_mapping.update(before)


def test_a_patch_refuses_a_foreign_function_and_leaves_the_model():
    model, inputs = llama(), text_inputs()
    model.set_attn_implementation(FOREIGN)
    before = run(model, inputs)
    for attempt in (
        lambda: ha.patch_model(model, ha.ConeConfig()),
        lambda: ha.patch_model(model, ha.HsaConfig(), mode="replace"),
    ):
        with pytest.raises(
            ValueError,
            match=f"runs attn_implementation='{FOREIGN}', a function that hf_hyperattn does",
        ):
            attempt()
        assert difference(before, run(model, inputs)) == 0


def test_a_patched_model_refuses_to_run_on_a_foreign_function(tmp_path):
    model, inputs = ha.patch_model(llama(), ha.ConeConfig()), text_inputs()
    before = run(model, inputs)
    for attempt in (
        lambda: model.set_attn_implementation(FOREIGN),
        lambda: setattr(model.config, "_attn_implementation", FOREIGN),
        lambda: model.set_attn_implementation({"": FOREIGN}),
    ):
        with pytest.raises(
            ValueError, match=f"'{FOREIGN}', a function that hf_hyperattn does not know"
        ):
            attempt()
        assert difference(before, run(model, inputs)) == 0
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=f"'{FOREIGN}', a function that hf_hyperattn does not know"
    ):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=FOREIGN)
    model.config.hyperattn_stock = FOREIGN  # a checkpoint that an earlier version allowed
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=f"checkpoint of LlamaForCausalLM runs attn_implementation='{FOREIGN}'"
    ):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_part_that_is_not_patched_may_run_a_foreign_function():
    model, inputs = llava(), llava_inputs()
    model.set_attn_implementation({"vision_config": FOREIGN})
    before = run(model, inputs)
    text = lambda host: "language_model" in host.name
    ha.patch_model(model, ha.ConeConfig(), layers=text)
    assert difference(before, run(model, inputs)) == 0
    with pytest.raises(ValueError, match=FOREIGN):
        model.set_attn_implementation({"text_config": FOREIGN})
    assert difference(before, run(model, inputs)) == 0


def test_a_replaced_function_by_a_known_name_is_foreign():
    AttentionInterface.register("sdpa", compute_half)
    with pytest.raises(
        ValueError,
        match="runs attn_implementation='sdpa', a function that hf_hyperattn does not know",
    ):
        ha.patch_model(llama(), ha.ConeConfig())


def in_closure(function):
    def wrapper(module, query, key, value, attention_mask, dropout, **keywords):
        return function(module, query * 1.5, key, value, attention_mask, dropout, **keywords)

    return wrapper


def with_wraps(function):
    @functools.wraps(function)
    def wrapper(module, query, *args, **keywords):
        return function(module, query * 1.5, *args, **keywords)

    return wrapper


class Wrapped:
    """A wrapper that is an object."""

    def __init__(self, function):
        self.function = function

    def __call__(self, module, query, *args, **keywords):
        return self.function(module, query * 1.5, *args, **keywords)


def as_partial(function):
    def call(function, module, query, *args, **keywords):
        return function(module, query * 1.5, *args, **keywords)

    return functools.partial(call, function)


WRAPPERS = {"closure": in_closure, "wraps": with_wraps, "object": Wrapped, "partial": as_partial}


@contextlib.contextmanager
def all_wrapped(wrapper):
    """Every registered function wrapped, in the way in which libraries do it."""
    functions = dict(ALL_ATTENTION_FUNCTIONS)
    for name, function in functions.items():
        ALL_ATTENTION_FUNCTIONS[name] = wrapper(function)
    try:
        yield
    finally:
        for name in functions:
            del ALL_ATTENTION_FUNCTIONS[name]


def moved(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("cone.gate"):
                parameter.fill_(0.5)
    return model


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_of_all_functions_act_once(kind):
    """At closed gates a patched model is the stock one, wrapper included; at open gates the wrapper acts too."""
    inputs = text_inputs()
    stock, model, opened = (
        llama(),
        ha.patch_model(llama(), ha.ConeConfig()),
        moved(ha.patch_model(llama(), ha.ConeConfig())),
    )
    model.load_state_dict(stock.state_dict(), strict=False)
    opened.load_state_dict(stock.state_dict(), strict=False)
    plain = run(opened, inputs)
    with all_wrapped(WRAPPERS[kind]):
        expected = run(stock, inputs)
        assert difference(expected, run(model, inputs)) == 0
        assert difference(plain, run(opened, inputs)) > 1e-3
        late = llama()
        late.load_state_dict(stock.state_dict())
        ha.patch_model(late, ha.ConeConfig())
        assert difference(expected, run(late, inputs)) == 0
        late.set_attn_implementation("eager")
        named = llama()
        named.set_attn_implementation("cone")
        run(named, inputs)
    assert (
        find_own_function(WRAPPERS[kind](ALL_ATTENTION_FUNCTIONS["sdpa"]))
        is ALL_ATTENTION_FUNCTIONS["sdpa"]
    )


def test_a_wrapper_that_is_not_around_ours_is_warned_about(caplog):
    caplog.set_level(logging.WARNING, "hf_hyperattn")
    AttentionInterface.register("sdpa", in_closure(ALL_ATTENTION_FUNCTIONS["sdpa"]))
    ha.patch_model(llama(), ha.ConeConfig())
    messages = [record.getMessage() for record in caplog.records]
    assert any(
        "'sdpa' is wrapped by" in message and "import hf_hyperattn before" in message
        for message in messages
    )


def test_arguments_by_position_are_those_by_name():
    model = llama()
    layer = model.model.layers[0].self_attn
    query, key, value = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
    for name in ("cone", "hype", "hyperbolic", "hf_hyperattn", "hyper_dot"):
        function = ALL_ATTENTION_FUNCTIONS[name]
        found, _ = function(layer, query, key, value, None, 0.0, 0.25, True)
        expected, _ = function(
            layer, query, key, value, None, dropout=0.0, scaling=0.25, is_causal=True
        )
        assert torch.equal(found, expected)
        with pytest.raises(TypeError, match="given 4 arguments after the mask"):
            function(layer, query, key, value, None, 0.0, 0.25, True, 1)


KEYS = [
    {"txt_config": "cone"},
    {"": "sdpa", "txt_config": "cone"},
    {"text_config": {"deeper": "cone"}},
]


@pytest.mark.parametrize("implementation", KEYS, ids=str)
def test_a_key_that_no_part_has_is_refused(implementation, tmp_path):
    unknown = "deeper" if "text_config" in implementation else "txt_config"
    model = llava()
    model.save_pretrained(tmp_path)
    data = model.config.to_dict() | {"attn_implementation": implementation}
    for attempt in (
        lambda: model.set_attn_implementation(implementation),
        lambda: setattr(model.config, "_attn_implementation", implementation),
        lambda: type(model).from_pretrained(tmp_path, attn_implementation=implementation),
        lambda: type(model)._from_config(model.config, attn_implementation=implementation),
        lambda: type(model)(type(model.config).from_dict(data)),
    ):
        with pytest.raises(
            ValueError,
            match=f"names the part '{unknown}', which .*Config does not have; allowed keys: ''",
        ):
            attempt()
    assert (
        model.config._attn_implementation == "sdpa" == model.config.text_config._attn_implementation
    )


@pytest.mark.skipif(
    Version(hf.__version__) < Version("5.23"), reason="earlier ones take no keys inside a part"
)
def test_keys_of_parts_are_heard():
    model = llava()
    model.set_attn_implementation({"text_config": {"": "cone"}})
    assert model.config.text_config._attn_implementation == "cone"
    model.set_attn_implementation(
        {"no_part": "sdpa"}
    )  # Transformers ignores it, and nothing of ours is lost
    assert model.config.text_config._attn_implementation == "cone"
