"""Routes against the classes of the installed Transformers: a change there is refused, never missed."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache
from transformers.models.bert.modeling_bert import BertSelfAttention

import model_patches
from model_patches.bert_layout import BertRoute
from model_patches.gptj import GPTJRoute
from model_patches.routing import STOCK_CACHE, AttentionRoute, calls_interface, routed_class
from model_patches.table import FILES

from .families import DECODERS

MODELS = Path(transformers.__file__).parent / "models"


def stock_classes():
    """Every stock attention class that has a route, with the route."""
    for stem, file in FILES.items():
        for path in MODELS.glob(f"*/modeling_{stem}.py"):
            module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for name, mixin in model_patches.routes_of(file).items():
                if hasattr(module, name) and issubclass(mixin, AttentionRoute):
                    yield getattr(module, name), mixin


def test_routes_take_what_the_stock_classes_take():
    """The cache above all: lost among other keywords, it made every step attend to itself."""
    seen = 0
    for stock, mixin in stock_classes():
        if calls_interface(stock):
            continue
        cls = routed_class(stock, mixin)
        ours, theirs = (list(inspect.signature(c.forward).parameters) for c in (cls, stock))
        if STOCK_CACHE in theirs and cls.forward is not stock.forward:
            assert ours.index("cache") == theirs.index(STOCK_CACHE), stock
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_cache(name):
    model = DECODERS["xglm"]()
    model_patches.serve(model)
    module, states = model.model.layers[0].self_attn, torch.randn(2, 5, 32)
    cache, found = DynamicCache(), []
    with torch.no_grad():
        whole = module(states)[0][:, -1]
        for step in states.split(1, dim=1):
            found.append(module(step, **{name: cache})[0])
    assert cache.get_seq_length() == 5
    assert torch.allclose(found[-1][:, 0], whole, atol=1e-6)


def test_an_argument_that_a_route_does_not_know_is_refused():
    class Later(nn.Module):
        def forward(
            self,
            hidden_states,
            attention_mask=None,
            encoder_hidden_states=None,
            memory=None,
            **kwargs,
        ): ...

    with pytest.raises(
        ValueError,
        match=r"^Later of Transformers [\d.]+ takes memory, which its route[^\n]*install",
    ):
        routed_class(Later, BertRoute)


def test_a_method_that_is_no_longer_there_is_refused():
    class Later(nn.Module):
        def forward(self, hidden_states, layer_past=None): ...

    with pytest.raises(
        ValueError, match=r"^Later of Transformers [\d.]+ no longer calls the methods"
    ):
        routed_class(Later, GPTJRoute)


def test_nothing_is_changed_where_one_class_is_refused(monkeypatch):
    model = DECODERS["bloom"]()
    stock = type(model.transformer.h[0].self_attention)

    def forward(
        self, hidden_states, residual, alibi, attention_mask, memory=None, layer_past=None, **kwargs
    ): ...

    monkeypatch.setattr(stock, "forward", forward)
    routed_class.cache_clear()
    with pytest.raises(ValueError, match="takes memory"):
        model_patches.serve(model)
    routed_class.cache_clear()
    assert (
        not any(model_patches.hosts(model)) and type(model.transformer.h[0].self_attention) is stock
    )


def test_classes_that_call_the_interface_are_left_alone(monkeypatch):
    """As GPT-J and CodeGen do since Transformers 5.24."""
    assert calls_interface(BertSelfAttention)
    model = DECODERS["bloom"]()
    assert not calls_interface(type(model.transformer.h[0].self_attention))
    monkeypatch.setattr(
        type(model.transformer.h[0].self_attention), "forward", BertSelfAttention.forward
    )
    assert not model_patches.serve(model)
    assert "_can_set_attn_implementation" not in vars(model)
    assert not model_patches.unserve(model)
