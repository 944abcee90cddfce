"""Widths of hosts, and the hidden states that reach layers which read them."""

import copy
import functools
import io
import threading
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_hyperattn as ha
from hf_hyperattn.config import MechanismConfig
from hf_hyperattn.integration.attention.hidden import HIDDEN, OTHER_FORMS
from hf_hyperattn.integration.attention.hyper import Layers
from hf_hyperattn.integration.patching.attach import all_hosts
from hf_hyperattn.mechanisms.base import MechanismLayer
from hf_hyperattn.registry import MECHANISMS, Mechanism, register
from tests.integration.models import FAMILIES, State, llama, perturb, run, text_inputs
from tests.zoo.tiny import tiny

SEEN = []


@dataclass(frozen=True)
class ToyReaderConfig(MechanismConfig):
    """Writes down what hidden states it sees."""

    mechanism = "toy_reader"


class ToyReaderLayer(MechanismLayer):
    reads_hidden = True

    def __init__(self, config, host, mode="replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.width = host.width
        self.gate = self.per_head(host)

    def change(self, plan):
        SEEN.append((self.width, plan.call))
        gate = self.gate[:, None, None] * plan.call.hidden.mean()
        return plan.change(after=(*plan.after, lambda out: out * (1 + gate)))

    def identical(self):
        return False


@pytest.fixture
def reader():
    register(Mechanism("toy_reader", "fusion", "a toy", ToyReaderConfig, ToyReaderLayer))
    SEEN.clear()
    yield ToyReaderConfig()
    del MECHANISMS["toy_reader"]


def seen_and_known(model, call, monkeypatch):
    """Widths of queries and values, by patched module: those of a real call, and those that its host was given."""
    seen, real = {}, Layers.forward
    ha.patch_model(model, ha.ConeConfig(), include_cross_attention=True)

    def spy(hyper, call, *args, **keywords):
        seen[hyper] = (call.query.shape[-1], call.value.shape[-1])
        return real(hyper, call, *args, **keywords)

    monkeypatch.setattr(Layers, "forward", spy)
    call()
    facts = {module.hyper: (host.head_dim, host.value_dim) for _, module, host in all_hosts(model)}
    return seen, {m: facts[m] for m in seen}


@pytest.mark.parametrize("family", FAMILIES)
def test_widths_are_those_of_a_real_call(family, monkeypatch):
    make, inputs = FAMILIES[family]
    model = make()
    seen, known = seen_and_known(model, lambda: run(model, inputs()), monkeypatch)
    assert seen and known == seen


def test_heads_may_be_narrower_than_the_config_says(monkeypatch):
    """SAM's attention between tokens and image has half of its config's width."""
    made, _ = tiny("base", "sam")
    seen, known = seen_and_known(made.model, lambda: run(made.model, made.inputs), monkeypatch)
    assert known == seen and len({query for query, _ in seen.values()}) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_reach_the_layer_and_nothing_stays(family, reader):
    make, inputs = FAMILIES[family]
    model = make()
    start, before = run(model, inputs()), State(model)
    ha.patch_model(model, reader, include_cross_attention=True)
    after = run(model, inputs())
    assert all(torch.allclose(start[n], after[n], atol=1e-5) for n in start)
    assert SEEN
    for width, call in SEEN:
        assert call.hidden.shape[-2:] == (call.query.shape[2], width)
        assert call.hidden.shape[0] == call.query.shape[0]
    ha.unpatch_model(model)
    assert not State(model).differences(before)


def test_a_host_without_such_a_layer_keeps_its_class(reader):
    model, stock = ha.patch_model(llama(), ha.ConeConfig()), llama()
    assert [type(module) for module in stock.modules()] == [
        type(m) for n, m in model.named_modules() if "hyper" not in n
    ]


def add_to_hidden(module, args, keywords):
    """A pre-hook that changes the hidden states, whichever way they come."""
    if args:
        return (args[0] + SHIFT, *args[1:]), keywords
    return args, keywords | {"hidden_states": keywords["hidden_states"] + SHIFT}


class AddToHidden(ModelHook):
    """The same for Accelerate, which replaces `forward` on the instance."""

    def pre_forward(self, module, *args, **keywords):
        return add_to_hidden(module, args, keywords)


#: Ways to change what the forward of an attention layer gets; each returns what undoes it.
CHANGES = {
    "pre-hook": lambda host: host.register_forward_pre_hook(add_to_hidden, with_kwargs=True).remove,
    "pre-hook, first": lambda host: (
        host.register_forward_pre_hook(add_to_hidden, with_kwargs=True, prepend=True).remove
    ),
    "global pre-hook": lambda host: (
        register_module_forward_pre_hook(
            lambda module, args: (args[0] + SHIFT, *args[1:]) if module is host else None
        ).remove
    ),
    "accelerate": lambda host: partial(
        remove_hook_from_module, add_hook_to_module(host, AddToHidden())
    ),
    "accelerate, appended": lambda host: partial(
        remove_hook_from_module,
        add_hook_to_module(add_hook_to_module(host, ModelHook()), AddToHidden(), append=True),
    ),
}
SHIFT = 0.5


class Positional(torch.nn.Module):
    """Calls an attention layer with its hidden states as the first argument: global pre-hooks see no keywords."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, hidden_states, **keywords):
        return self.inside(hidden_states, **keywords)


@pytest.mark.parametrize("before", [True, False], ids=["before the patch", "after the patch"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_layer_reads_what_forward_gets(change, before, reader):
    """The queries say what it got: the toy's hidden states must give them by the layer's own projection."""
    model = llama(attention_bias=False)
    layer = model.model.layers[1]
    host = layer.self_attn
    if before:
        undo = CHANGES[change](host)
    ha.patch_model(model, reader)
    if not before:
        undo = CHANGES[change](host)
    layer.self_attn = Positional(host)
    projected = []
    host.v_proj.register_forward_pre_hook(lambda module, args: projected.append(args[0]))
    run(model, text_inputs())
    assert torch.equal(SEEN[1][1].hidden, projected[0])
    layer.self_attn = host
    undo()
    SEEN.clear()
    projected.clear()
    run(model, text_inputs())
    assert torch.equal(SEEN[1][1].hidden, projected[0])
    ha.unpatch_model(model)
    assert host.forward.__func__ is LlamaAttention.forward  # Accelerate leaves it on the instance
    assert type(host) is LlamaAttention


def test_head_fusion_weighs_by_what_forward_gets():
    """A hook that shifts the hidden states is the same as hidden states that come shifted."""
    model = ha.patch_model(llama(), ha.HeadFusionConfig())
    perturb(model, 1.0)
    host = model.model.layers[1].self_attn
    hidden, positions = torch.randn(2, 7, 32), torch.arange(7)[None]
    call = dict(position_embeddings=model.model.rotary_emb(hidden, positions), attention_mask=None)
    with torch.no_grad():
        expected = host(hidden + SHIFT, **call)[0]
        assert (expected - host(hidden, **call)[0]).abs().max() > 1e-3
        host.register_forward_pre_hook(add_to_hidden, with_kwargs=True)
        assert torch.equal(host(hidden, **call)[0], expected)
        assert torch.equal(host(hidden_states=hidden, **call)[0], expected)


def test_a_forward_replaced_before_the_patch_is_refused(reader):
    model = llama()
    host = model.model.layers[2].self_attn
    original = host.forward
    host.forward = lambda *args, **keywords: original(*args, **keywords)
    before = State(model)
    with pytest.raises(ValueError, match="layers.2.self_attn.forward was replaced on the instance"):
        ha.patch_model(model, reader)
    assert not State(model).differences(before)
    del host.forward
    ha.patch_model(model, reader)
    patched = host.forward
    host.forward = lambda hidden_states, **keywords: patched(hidden_states + SHIFT, **keywords)
    projected = []
    host.v_proj.register_forward_pre_hook(lambda module, args: projected.append(args[0]))
    run(model, text_inputs())
    assert torch.equal(SEEN[2][1].hidden, projected[0])
    host.forward = partial(LlamaAttention.forward, host)
    with pytest.raises(ValueError, match="came past it"):
        run(model, text_inputs())


def shift_input(forward):
    @functools.wraps(forward)
    def shifted(hidden_states, *args, **keywords):
        return forward(hidden_states + SHIFT, *args, **keywords)

    return shifted


def call_elsewhere(forward):
    """It says that it wraps the forward of the layer, and calls another one."""

    @functools.wraps(forward)
    def elsewhere(*args, **keywords):
        return torch.zeros(2, 7, 32), None

    return elsewhere


def compile_eagerly(forward):
    return torch.compile(forward, backend="eager")


#: Wrappers that name the forward which they call.
WRAPPERS = {
    "wraps": [shift_input],
    "wraps, twice": [shift_input, shift_input],
    "compiled": [compile_eagerly],
    "compiled wrapper": [shift_input, compile_eagerly],
}


@pytest.mark.parametrize("wrappers", WRAPPERS.values(), ids=WRAPPERS)
def test_a_forward_wrapped_before_the_patch_is_served(wrappers):
    """As it is if it is wrapped after the patch, and the wrapper itself comes back."""
    found = []
    for before in (True, False):
        torch.manual_seed(0)
        model = llama()
        host = model.model.layers[2].self_attn
        if not before:
            ha.patch_model(model, ha.HeadFusionConfig())
        for wrap in wrappers:
            host.forward = wrap(host.forward)
        wrapper, state = host.forward, State(model)
        if before:
            ha.patch_model(model, ha.HeadFusionConfig())
        torch.manual_seed(1)
        perturb(model, 1.0)
        found.append(run(model, text_inputs()))
        if before:
            assert host.forward is not wrapper
            ha.unpatch_model(model)
            assert host.forward is wrapper and not State(model).differences(state)
            run(model, text_inputs())
    assert all(torch.allclose(found[0][n], found[1][n], atol=1e-5) for n in found[0])


def test_a_wrapper_of_a_wrapped_forward_outlives_the_patch():
    model = llama()
    host = model.model.layers[2].self_attn
    host.forward = shift_input(host.forward)
    ha.patch_model(model, ha.HeadFusionConfig())
    host.forward = later = shift_input(host.forward)
    run(model, text_inputs())
    ha.unpatch_model(model)
    assert host.forward is later
    run(model, text_inputs())


def test_a_forward_that_wraps_and_calls_another_is_refused(reader):
    model = llama()
    host = model.model.layers[2].self_attn
    host.forward = call_elsewhere(host.forward)
    with pytest.raises(
        ValueError,
        match=r"layers.2.self_attn.forward was replaced on the instance.*functools.wraps",
    ):
        ha.patch_model(model, reader)


def row_of(value, outputs):
    """Whether every number of a row of values is in the same row of what one of the projections makes."""
    return any(
        bool(((value[:, :, None] - out[:, None]).abs().amin(-1) < 1e-5).all()) for out in outputs
    )


PACKED = """
    qwen2_5_vl_vision cohere_compass_vision cosmos3_edge_vision exaone4_5_vision glm4v_moe_vision glm4v_vision
    glm5_next_vision glm_image_vision glm_ocr_vision hunyuan_vl_vision inkling2_vision kimi_k25_vision lfm3_vl_vision
    minicpm_ocr_vision minicpmv4_7_vision muse_glimmer_vision muse_spark_vision qwen3_5_moe_vision qwen3_5_vision
    qwen3_asr_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision video_llama_3_vision
""".split()


@pytest.mark.parametrize(
    "family", [PACKED[0], *(pytest.param(f, marks=pytest.mark.slow) for f in PACKED[1:])]
)
def test_images_in_one_row_are_read_one_by_one(family, reader, monkeypatch):
    """Values are projected from hidden states without rotation, so they say which rows a call is about."""
    if type(hf.AutoConfig.for_model(family)) not in hf.AutoModel._model_mapping.keys():
        pytest.skip(f"Transformers {hf.__version__} builds {family} inside other models alone")
    made, _ = tiny("base", family)
    calls, real = [], ToyReaderLayer.change

    def change(layer, plan):
        calls.append((layer, plan.call))
        return real(layer, plan)

    monkeypatch.setattr(ToyReaderLayer, "change", change)
    ha.patch_model(made.model, reader)
    hosts = {
        host.hyper.toy_reader: host for host in made.model.modules() if HIDDEN in host.__dict__
    }
    packed = [layer for layer, host in hosts.items() if host.packed]
    run(made.model, made.inputs)
    of_packed = [(layer, call) for layer, call in calls if layer in packed]
    assert len(of_packed) > len(packed)
    for layer, call in of_packed:
        hidden, (rows, _) = call.hidden[0], call.hidden.shape[1:]
        linear = [
            m for m in hosts[layer].modules() if getattr(m, "in_features", None) == hidden.shape[-1]
        ]
        with torch.no_grad():
            assert row_of(
                call.value[0].transpose(0, 1).reshape(rows, -1), [m(hidden) for m in linear]
            )


def test_head_fusion_of_two_images_is_that_of_each():
    made, _ = tiny("base", "qwen2_vl")
    tower = ha.patch_model(made.model, ha.HeadFusionConfig()).visual
    perturb(made.model, 1.0)
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    pixels = torch.randn(48, tower.patch_embed.proj.weight[0].numel())
    with torch.no_grad():
        both = tower(pixels, grid_thw=grid)
        each = [
            tower(part, grid_thw=grid[i : i + 1]) for i, part in enumerate(pixels.split([16, 32]))
        ]
    for name, states in (
        ("last_hidden_state", both.last_hidden_state),
        ("pooler_output", both.pooler_output),
    ):
        assert torch.allclose(states, torch.cat([one[name] for one in each]), atol=1e-5), name


#: A model type for each of `OTHER_FORMS`.
UNREADABLE = "fsmt granite_speech5_encoder sam sam2 sam3 sam_hq seggpt squeezebert vitdet".split()


@pytest.mark.parametrize(
    "family",
    [
        UNREADABLE[-2],
        *(pytest.param(f, marks=pytest.mark.slow) for f in UNREADABLE if f != "squeezebert"),
    ],
)
def test_hidden_states_of_another_form_are_refused_by_the_patch(family, reader):
    """And each of them is rightly on the list: it would be refused by the call."""
    made, _ = tiny("base", family)
    before = State(made.model)
    with pytest.raises(
        ValueError, match="^toy_reader reads a row of hidden states for each query, and .* gets "
    ):
        ha.patch_model(made.model, reader)
    assert not State(made.model).differences(before)
    with patch.dict(OTHER_FORMS, clear=True):
        ha.patch_model(made.model, reader)
    with pytest.raises(ValueError, match="was called with hidden states .* reads one row a query"):
        run(made.model, made.inputs)


@pytest.mark.parametrize("family", ["llama", "mpnet"])
def test_copies_and_pickles_note_their_own_hidden_states(family, reader):
    """MPNet's attention is routed, so that two classes stand before the stock one."""
    make, inputs = FAMILIES[family]
    model = ha.patch_model(make(), reader)
    perturb(model)
    expected, file = run(model, inputs()), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert [type(m) for m in copied.modules()] == [type(m) for m in model.modules()]
        found = run(copied, inputs())
        assert all(torch.equal(found[n], expected[n]) for n in expected)
        ha.unpatch_model(copied)
        assert [type(m) for m in copied.modules()] == [type(m) for m in make().modules()]


def inside_attention(model):
    """A module that runs after a host's hidden states were noted, and before its attention reads them."""
    return model.model.layers[0].self_attn.v_proj


def shorter():
    return {name: t[:1, :7] for name, t in text_inputs().items()}


def test_a_model_called_again_by_its_own_hook(reader):
    model = ha.patch_model(llama(), reader)
    perturb(model)
    expected, inner, seen = run(model, text_inputs()), run(model, shorter()), []

    def hook(*_):
        handle.remove()
        seen.append(run(model, shorter()))

    handle = inside_attention(model).register_forward_hook(hook)
    found = run(model, text_inputs())
    assert all(
        torch.equal(found[n], expected[n]) and torch.equal(seen[0][n], inner[n]) for n in expected
    )


def test_threads_of_one_model(reader):
    model = ha.patch_model(llama(), reader)
    perturb(model)
    calls = [text_inputs(), shorter(), {"input_ids": text_inputs()["input_ids"].flip(1)}]
    expected, found = [run(model, inputs) for inputs in calls], {}
    barrier = threading.Barrier(len(calls), timeout=60)
    inside_attention(model).register_forward_hook(lambda *_: None if barrier.wait() else None)
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: run(model, calls[i])}))
        for i in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, want in enumerate(expected):
        assert all(torch.equal(found[i][n], want[n]) for n in want)


def test_nothing_is_kept_after_an_error(reader):
    model = ha.patch_model(llama(), reader)

    def fail(*_):
        raise KeyError("in the middle")

    handle = inside_attention(model).register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(**text_inputs())
    handle.remove()
    hosts = [module for module in model.modules() if HIDDEN in module.__dict__]
    assert hosts and all(getattr(host, HIDDEN).call is None for host in hosts)
    model(**text_inputs())
    assert all(getattr(host, HIDDEN).call is None for host in hosts)


def test_gradients_are_the_same_under_gradient_checkpointing(reader):
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = ha.patch_model(llama(), reader).train()
        perturb(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**text_inputs(), use_cache=False).logits.square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    assert any(".hyper." in n and g.abs().max() > 0 for n, g in found[0].items())
    assert all(torch.allclose(g, found[1][n], atol=1e-6) for n, g in found[0].items())


def test_under_the_compiler(reader):
    model = ha.patch_model(llama(), reader)
    perturb(model)
    expected = run(model, text_inputs())
    torch._dynamo.reset()
    found = run(torch.compile(model, backend="eager", fullgraph=True), text_inputs())
    assert all(torch.allclose(expected[n], found[n], atol=1e-5) for n in expected)
