"""An attention layer whose forward never calls the attention interface: the first call says so."""

import contextlib
import copy
import threading
import types

import accelerate
import peft
import pytest
import torch
import transformers as hf
from transformers.models.llama import modeling_llama

import hf_hyperattn as ha
from hf_hyperattn.integration.attention.first_call import WATCHED, check_reached
from hf_hyperattn.mechanisms.sparse import Window
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

PATCHES = {
    "cone": ha.ConeConfig(),
    "hyperbolic": ha.HyperbolicConfig(),
    "hype": ha.HypeConfig(max_length=64),
    "hsa": ha.HsaConfig(windows=(2, 4)),
    "sparse": ha.SparseConfig(Window(4)),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "mkl": ha.MklConfig(),
    "trilinear": ha.TrilinearConfig(windows=(4, 3)),
}
NAMES = ("cone", "hype", "hyperbolic")
#: What the error names: the layer, the function in its place, and the way out.
ERROR = r"layers\.1\.self_attn ran without the mechanism.*ignore_interface.*(layers=|'sdpa')"


def ignore_interface(self, hidden_states, *args, **kwargs):
    """Llama's attention without heads, masks and the attention interface."""
    return self.o_proj(self.q_proj(hidden_states)), None


class OwnForward(modeling_llama.LlamaAttention):
    """A subclass whose forward is its own, and whose parent calls the interface."""

    forward = ignore_interface


class CallsParent(modeling_llama.LlamaAttention):
    """A subclass that changes the input and lets its parent do the rest."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states * 1.0, *args, **kwargs)


def replace_on_instance(layer):
    layer.forward = types.MethodType(ignore_interface, layer)


def replace_class(layer):
    layer.__class__ = OwnForward


REPLACED = {"instance": replace_on_instance, "subclass": replace_class}


def attention(model, index=1):
    return model.model.layers[index].self_attn


def watched(model) -> list:
    """The layers that are watched, by the name that they keep and by the hook."""
    by_hook = [m for m in model.modules() if check_reached in m._forward_hooks.values()]
    assert by_hook == [m for m in model.modules() if WATCHED in vars(m)]
    return by_hook


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("mechanism", PATCHES)
def test_a_patch_of_a_layer_that_ignores_it_is_an_error(mechanism, how):
    model = llama()
    REPLACED[how](attention(model))
    if (
        mechanism == "head_fusion" and how == "instance"
    ):  # It puts a forward of its own around the layer's.
        with pytest.raises(
            ValueError,
            match="was replaced on the instance, and head_fusion reads the hidden states",
        ):
            ha.patch_model(model, PATCHES[mechanism])
        return
    ha.patch_model(model, PATCHES[mechanism])
    for _ in range(2):  # Not only once: the second call would be as wrong as the first.
        with pytest.raises(ValueError, match=ERROR):
            model(**text_inputs())


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_a_layer_that_ignores_it_is_an_error(name, how):
    model = llama()
    REPLACED[how](attention(model))
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=ERROR):
        model(**text_inputs())
    model.set_attn_implementation("sdpa")
    assert not watched(model)
    model(**text_inputs())


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("use", ["patch", "name"])
def test_a_forward_that_is_replaced_before_the_first_call_is_an_error(use, how):
    model = llama()
    ha.patch_model(model, ha.ConeConfig()) if use == "patch" else model.set_attn_implementation(
        "cone"
    )
    REPLACED[how](attention(model))
    with pytest.raises(ValueError, match=ERROR):
        model(**text_inputs())


@contextlib.contextmanager
def replaced_forward(cls, forward):
    original = cls.forward
    cls.forward = forward
    try:
        yield original
    finally:
        cls.forward = original


def test_a_class_whose_forward_was_replaced_is_no_host_until_it_is_put_back():
    with replaced_forward(modeling_llama.LlamaAttention, ignore_interface):
        model = llama()
        with pytest.raises(ValueError, match="never calls Transformers' attention interface"):
            ha.patch_model(model, ha.ConeConfig())
        with pytest.raises(ValueError, match="never calls Transformers' attention interface"):
            model.set_attn_implementation("cone")
    assert ha.describe(ha.patch_model(model, ha.ConeConfig()))["patched"] == 4
    with replaced_forward(modeling_llama.LlamaAttention, ignore_interface):
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn ran without the mechanism"):
            model(**text_inputs())


def test_a_class_whose_new_forward_calls_the_old_one_works():
    expected = run(llama_with_gates(), text_inputs())

    def wrapper(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    with replaced_forward(modeling_llama.LlamaAttention, None) as original:
        modeling_llama.LlamaAttention.forward = wrapper
        with pytest.raises(ValueError, match="never calls Transformers' attention interface"):
            ha.patch_model(llama(), ha.ConeConfig())
    model = llama_with_gates()
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(wrapper, layer.self_attn)
    assert difference(expected, run(model, text_inputs())) == 0 and not watched(model)


def llama_with_gates():
    torch.manual_seed(0)
    model = ha.patch_model(llama(), ha.ConeConfig())
    perturb(model)
    return model


def test_loading_and_copies_are_watched(tmp_path):
    model = llama_with_gates()
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    named = hf.AutoModelForCausalLM.from_config(llama().config, attn_implementation="cone")
    for fresh in (loaded, named, copy.deepcopy(loaded)):
        assert len(watched(fresh)) == 4
        replace_on_instance(attention(fresh))
        with pytest.raises(ValueError, match=ERROR):
            fresh(**text_inputs())


def test_an_adapter_s_layers_are_watched():
    model = llama()
    replace_on_instance(attention(model))
    config = ha.HyperLoraConfig(mechanisms=[ha.ConeConfig()], r=2, target_modules=["v_proj"])
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(ValueError, match=ERROR):
        adapted(**text_inputs())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use", ["patch", "name"])
def test_the_first_call_ends_the_watch(family, use):
    make, inputs = FAMILIES[family]
    model = make()
    if use == "patch":
        ha.patch_model(model, ha.ConeConfig())
    else:
        model.set_attn_implementation("cone")
    assert watched(model)
    run(model, inputs())
    assert not watched(model)


@pytest.mark.parametrize("called", [False, True])
def test_unpatching_leaves_no_watch(called):
    model = llama()
    before = State(model)
    ha.patch_model(model, ha.ConeConfig())
    if called:
        model(**text_inputs())
    ha.unpatch_model(model)
    assert before.differences(State(model)) == []


def test_layers_that_do_not_run_are_no_error():
    """Layer dropping and early exit: what is not called says nothing."""
    model = llama_with_gates()
    skipped = model.model.layers[2]
    skipped.forward = lambda hidden_states, *args, **kwargs: hidden_states
    model(**text_inputs())
    assert watched(model) == [skipped.self_attn]
    del skipped.forward
    model(**text_inputs())
    assert not watched(model)


def test_a_subclass_that_calls_its_parent_works():
    expected, model = run(llama_with_gates(), text_inputs()), llama_with_gates()
    for layer in model.model.layers:
        layer.self_attn.__class__ = CallsParent
    assert difference(expected, run(model, text_inputs())) == 0


def test_wrapped_forwards_work():
    inputs = text_inputs()
    expected = run(llama_with_gates(), inputs)
    hooked = llama_with_gates()
    for module in list(hooked.modules()):
        accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
    assert difference(expected, run(hooked, inputs)) == 0 and not watched(hooked)
    adapted = peft.get_peft_model(llama_with_gates(), peft.LoraConfig(target_modules=["q_proj"]))
    assert difference(expected, run(adapted, inputs)) == 0 and not watched(adapted)
    checkpointed = llama_with_gates()
    checkpointed.gradient_checkpointing_enable()
    checkpointed.train()(**inputs).logits.sum().backward()
    assert all(p.grad is not None for n, p in checkpointed.named_parameters() if ".hyper." in n)
    assert not watched(checkpointed)


def compile_eagerly(function):
    return torch.compile(function, backend="eager")


@pytest.mark.slow
def test_compiled_forwards_work():
    """Compiled layer by layer, as a module and as a whole; other layers may take the graph of the first one."""
    inputs = text_inputs()
    expected = run(llama_with_gates(), inputs)
    layerwise, whole, module = llama_with_gates(), llama_with_gates(), llama_with_gates()
    for layer in layerwise.model.layers:
        layer.self_attn.forward = compile_eagerly(layer.self_attn.forward)
    for layer in module.model.layers:
        layer.self_attn.compile(backend="eager")
    for model in (layerwise, module, torch.compile(whole, backend="eager", fullgraph=True)):
        for _ in range(2):
            assert difference(expected, run(model, inputs)) <= 1e-5


@pytest.mark.slow
def test_a_compiled_forward_that_ignores_the_interface_is_an_error():
    model = llama_with_gates()
    layer = attention(model)
    layer.forward = compile_eagerly(types.MethodType(ignore_interface, layer))
    with pytest.raises(ValueError, match=ERROR):
        model(**text_inputs())


@pytest.mark.parametrize("use", ["patch", "name"])
def test_big_bird_on_an_encoder_s_states_is_an_error(use):
    """All its layers, and not only cross-attention, then attend to these states, in the stock class."""
    sizes = dict(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
    )
    config = hf.BigBirdConfig(
        **sizes, attention_type="original_full", is_decoder=True, add_cross_attention=True
    )
    model, ids = hf.BigBirdModel(config).eval(), text_inputs()["input_ids"]
    ha.patch_model(model, ha.ConeConfig()) if use == "patch" else model.set_attn_implementation(
        "cone"
    )
    with pytest.raises(ValueError, match="attention.self ran without the mechanism"):
        model(input_ids=ids, encoder_hidden_states=torch.randn(2, 3, 32))
    model(input_ids=ids)


def set_name_again(model):
    model.set_attn_implementation("cone")


def set_name_in_a_thread(model):
    thread = threading.Thread(target=set_name_again, args=(model,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("switch", [set_name_again, set_name_in_a_thread])
def test_a_name_that_is_set_while_a_layer_runs_is_no_error(switch):
    model = llama()
    model.set_attn_implementation("cone")
    layer = attention(model)
    handle = layer.o_proj.register_forward_hook(lambda *_: switch(model))
    model(**text_inputs())
    handle.remove()
    model.set_attn_implementation("cone")
    assert not watched(model)
    replace_on_instance(layer)
    model.set_attn_implementation("cone")
    assert watched(model) == [layer]
    with pytest.raises(ValueError, match=ERROR):
        model(**text_inputs())


@pytest.mark.parametrize("mechanism", ["cone", "head_fusion"])
def test_an_adapter_that_is_switched_while_a_layer_runs_is_no_error(mechanism):
    """Adapters of head_fusion also change the class of the layer."""
    model, target = llama(), dict(r=2, target_modules=["v_proj"])
    adapted = peft.get_peft_model(
        model, ha.HyperLoraConfig(mechanisms=[PATCHES[mechanism]], **target), "one"
    )
    adapted.add_adapter("two", ha.HyperLoraConfig(mechanisms=[PATCHES["hyperbolic"]], **target))
    handle = attention(model).o_proj.register_forward_hook(lambda *_: adapted.set_adapter("two"))
    adapted(**text_inputs())
    handle.remove()
    adapted(**text_inputs())
    assert not watched(model)


def test_what_the_stock_model_runs_is_not_watched():
    assert not watched(llama()) and not watched(bert())
    model = ha.patch_model(llama(), ha.ConeConfig(), layers=[0])
    assert watched(model) == [attention(model, 0)]
    replace_on_instance(attention(model))
    model(**text_inputs())
