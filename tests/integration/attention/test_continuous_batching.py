"""Continuous batching (`generate_batch`) writes what `generate` writes, or is refused with the reason."""

from dataclasses import fields

import pytest
import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_hyperattn as ha
from hf_hyperattn.integration.attention import call_path
from hf_hyperattn.integration.loading.continuous_batching import asks_for_graphs
from hf_hyperattn.rules import Pages, Window
from tests.integration.models import FAMILIES
from tests.oracles.marks import first_always

PROMPTS = [[7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [31, 32, 33, 34, 35]]
SERVED = {
    "cone": ha.ConeConfig(),
    "hyperbolic": ha.HyperbolicConfig(),
    "hype": ha.HypeConfig(),
    "hsa": ha.HsaConfig(windows=(2, 4), near=2, sinks=1, refine_top_k=1),
    "pages": ha.SparseConfig(Pages(page=2, near=2, sinks=1, top=1, query="own")),
    "pages, previous": ha.SparseConfig(
        [
            Pages(page=2, near=2, sinks=1, top=1, query="previous", chunk=4),
            Pages(page=2, near=2, sinks=1, top=1, query="first", chunk=4),
        ]
        * 2
    ),
    "windows": ha.SparseConfig(Window(near=3, sinks=1)),
    "head_fusion": ha.HeadFusionConfig(),
    "talking_heads": ha.TalkingHeadsConfig(),
    "mkl": ha.MklConfig(),
    "mkl, conditional": ha.MklConfig(kind="conditional"),
    "trilinear": ha.TrilinearConfig(windows=(None, None)),
    "trilinear, windows": ha.TrilinearConfig(windows=(8, 4)),
}


def steep(family: str = "llama", **changes):
    """A random model whose attention and next tokens are no matter of rounding."""
    torch.manual_seed(0)
    model = FAMILIES[family][0](**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def page_size() -> str:
    """The name that this version of Transformers has for the tokens of a page."""
    names = {f.name for f in fields(ContinuousBatchingConfig)}
    return "page_size" if "page_size" in names else "block_size"  # 5.17


def generated(model, prompts=PROMPTS, **changes) -> list[list[int]]:
    """What continuous batching appends to each prompt, in steps that hold tokens of several requests."""
    settings = dict(max_new_tokens=6, do_sample=False, eos_token_id=-1) | changes
    options = GenerationConfig(**settings)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16, **{page_size(): 8})
    found = model.generate_batch(
        prompts, generation_config=options, continuous_batching_config=small, progress_bar=False
    )
    return [
        r.generated_tokens
        for _, r in sorted(found.items(), key=lambda item: int(item[0].split("_")[-1]))
    ]


def alone(model) -> list[list[int]]:
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=-1)
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


@first_always("name, layers", [("cone", [1]), *((name, None) for name in SERVED)])
def test_patched(name, layers):
    stock = alone(steep())
    selects = name in ("hsa", "pages", "pages, previous", "windows")
    model = ha.patch_model(
        steep(), SERVED[name], layers=layers, mode="replace" if selects else "blend"
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".hyper." in parameter_name:
                parameter.add_(torch.randn_like(parameter))
    expected = alone(model)
    assert generated(model) == expected and expected != stock
    assert model.config._attn_implementation == "hf_hyperattn"


def test_by_name():
    model = steep()
    stock = alone(model)
    model.set_attn_implementation("cone")
    expected = alone(model)
    assert generated(model) == expected and expected != stock
    assert model.config._attn_implementation == "cone"


def test_the_plain_dot_product_on_our_engine():
    model = steep()
    expected = alone(model)
    model.set_attn_implementation("hyper_dot")
    assert generated(model) == expected
    assert model.config._attn_implementation == "hyper_dot"


def test_eager_attention_beneath_gates_of_zero():
    model = steep()
    expected = alone(model)
    ha.patch_model(model, ha.ConeConfig(), layers=[2])
    model.set_attn_implementation("eager")
    assert generated(model) == expected


@pytest.mark.parametrize(
    "query, changes, message",
    [
        ("chunk", {}, r"is refused in continuous batching: .*allowed: query='own', 'first' or"),
        (
            "first",
            {"num_return_sequences": 2, "do_sample": True},
            r"num_return_sequences=2.*allowed: one sequence",
        ),
    ],
)
def test_rules_that_cannot_be_served_are_refused(query, changes, message):
    model = ha.patch_model(steep(), ha.SparseConfig(Pages(query=query)))
    with pytest.raises(ValueError, match=message) as raised:
        generated(model, **changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, False),
        ({"use_cuda_graph": False}, False),
        ({"use_cuda_graph": True}, True),
        ({"use_cuda_graph": (False, True)}, True),
        ({"q_padding_interval_size": 64}, True),
        ({"use_cuda_graph": False, "kv_padding_interval_size": 64}, False),
    ],
)
def test_settings_that_ask_for_cuda_graphs(settings, expected):
    """As Transformers reads them: the switch decides, else settings that only graphs use."""
    assert asks_for_graphs(ContinuousBatchingConfig(**settings)) == expected


def test_ranks_that_share_tokens_are_refused(monkeypatch):
    monkeypatch.setattr(call_path, "find_context", lambda module: object())
    model = ha.patch_model(steep(), SERVED["cone"])
    with pytest.raises(ValueError, match="outside of it"):
        call_path.attend_step(model.model.layers[0].self_attn, *[None] * 6)


def test_stock_models_are_as_they_were():
    model = steep()
    assert generated(model) == alone(model)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 5, 5, dtype=torch.bool)])
def test_an_ordinary_cache_in_the_call_is_not_taken_for_a_paged_one(mask):
    """Encoders of Transformers 5.24 hand down all keywords, `cache` among them, which the original ignores."""
    model = ha.patch_model(steep(), ha.ConeConfig(), mode="replace")
    module, call = (
        model.model.layers[0].self_attn,
        ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation],
    )
    query, key, value = torch.randn(3, 1, module.config.num_attention_heads, 5, module.head_dim)
    key, value = (
        key[:, : module.config.num_key_value_heads],
        value[:, : module.config.num_key_value_heads],
    )
    cache = DynamicCache()
    with torch.no_grad():
        expected, found = (
            call(module, query, key, value, mask, **more)[0] for more in ({}, {"cache": cache})
        )
    assert torch.equal(found, expected) and cache.get_seq_length() == 0
