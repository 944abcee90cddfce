"""`convert` by itself, with conversions made up for it: who is asked, what is refused, what can be undone."""

from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

import hf_hyperattn as ha
from hf_hyperattn.config import HyperAttnConfig, MechanismConfig, option
from hf_hyperattn.config.registry import LISTENERS
from hf_hyperattn.integration import convert
from hf_hyperattn.integration.patching import conversions
from hf_hyperattn.integration.patching.conversions import (
    Conversion,
    keep_parts,
    register_conversion,
)
from hf_hyperattn.mechanisms.base import MechanismLayer
from hf_hyperattn.registry import MECHANISMS, Mechanism, register
from tests.integration.models import FAMILIES, State, bert, llama

RANK = ha.CollaborativeConfig(rank=6)


@dataclass(frozen=True)
class ToyWholeConfig(MechanismConfig):
    """A change of architecture and nothing else."""

    mechanism = "toy_whole"
    size: int = option(2, "nothing", least=1)


class Converted(hf.BertModel):
    """What it makes."""


@pytest.fixture
def toy(monkeypatch):
    """A conversion to another class; the list collects what it was called with."""
    calls = []

    def run(model, config, keep_original):
        calls.append((model, config, keep_original))
        new = Converted(model.config).eval()
        new.load_state_dict(model.state_dict())
        if keep_original:
            keep_parts(new, lambda converted, original: original, model)
        return new

    monkeypatch.setattr("hf_hyperattn.config.registry.LISTENERS", list(LISTENERS))
    register(Mechanism("toy_whole", "structure", "none", ToyWholeConfig, MechanismLayer))
    done = lambda model: isinstance(model, Converted)
    register_conversion("toy_whole", Conversion(run, requested=lambda config: True, done=done))
    yield calls
    del MECHANISMS["toy_whole"], conversions.CONVERSIONS["toy_whole"]


def refused(what, *args, match, **keywords):
    """The call raises in one line, and leaves the model that it was given as it was."""
    model = args[0]
    before = State(model) if isinstance(model, hf.PreTrainedModel) else None
    with pytest.raises(ValueError, match=match) as error:
        what(*args, **keywords)
    assert "\n" not in str(error.value)
    assert before is None or not before.differences(State(model))


def test_the_conversion_gets_the_model_the_config_and_the_wish(toy):
    model, config = bert(), ToyWholeConfig(size=3)
    new = convert(model, config)
    assert isinstance(new, Converted) and toy == [(model, config, False)]
    convert(model, HyperAttnConfig((config,)), keep_original=True)
    assert toy[1] == (model, config, True)


def test_the_original_comes_back_where_it_was_kept(toy):
    model = bert()
    assert ha.unpatch_model(convert(model, ToyWholeConfig(), keep_original=True)) is model
    refused(ha.unpatch_model, convert(model, ToyWholeConfig()), match="keep_original=True")


def test_a_patch_on_a_converted_model_goes_first(toy):
    model = bert()
    new = convert(model, ToyWholeConfig(), keep_original=True)
    before = State(new)
    ha.patch_model(new, ha.ConeConfig())
    assert ha.unpatch_model(new) is new and not before.differences(State(new))
    assert ha.unpatch_model(new) is model


def test_what_was_kept_is_used_once(toy):
    new = convert(bert(), ToyWholeConfig(), keep_original=True)
    ha.unpatch_model(new)
    refused(ha.unpatch_model, new, match="keep_original=True")


def test_a_second_conversion_is_refused(toy):
    new = convert(bert(), ToyWholeConfig())
    refused(convert, new, ToyWholeConfig(), match="converted already, by toy_whole")
    refused(convert, new, RANK, match="converted already, by toy_whole")


def test_a_patch_with_it_is_refused(toy):
    refused(ha.patch_model, bert(), ToyWholeConfig(), match=r"hf_hyperattn\.convert")
    refused(
        ha.patch_model, bert(), HyperAttnConfig((ToyWholeConfig(),)), match=r"hf_hyperattn\.convert"
    )
    refused(ha.patch_model, bert(), RANK, match=r"hf_hyperattn\.convert")
    named = {"encoder.layer.0.attention.self": (RANK,)}
    hidden = HyperAttnConfig((ha.CollaborativeConfig(),), overrides=named)
    refused(ha.patch_model, bert(), hidden, match=r"hf_hyperattn\.convert")


def test_a_conversion_of_a_whole_model_stands_alone(toy):
    for config in (
        HyperAttnConfig((ToyWholeConfig(), ha.ConeConfig())),
        HyperAttnConfig((ToyWholeConfig(),), layers=[0]),
        HyperAttnConfig((ToyWholeConfig(),), mode="replace"),
    ):
        refused(convert, bert(), config, match="its config alone")
    refused(
        convert,
        bert(),
        ToyWholeConfig(),
        examples=[dict(input_ids=torch.ones(1, 2))],
        match="no examples",
    )


@pytest.mark.parametrize(
    "config",
    [ha.ConeConfig(), ha.CollaborativeConfig(), HyperAttnConfig((ha.HypeConfig(),))],
    ids=str,
)
def test_what_is_no_conversion_is_refused(config):
    refused(convert, bert(), config, match="patch_model is for it")


@pytest.mark.parametrize(
    "config", [None, "collaborative", [RANK], HyperAttnConfig(()), {"rank": 6}], ids=str
)
def test_what_is_no_config_is_refused(config):
    refused(convert, bert(), config, match="allowed: the config of a conversion")


@pytest.mark.parametrize("wish", [None, 1, "yes"])
def test_keep_original_is_a_yes_or_no(wish):
    refused(convert, bert(), RANK, wish, match="allowed: True or False")


@pytest.mark.parametrize(
    "examples", [[], {}, "text", 3, [1], [["input_ids"]], dict(input_ids=torch.ones(1, 3))]
)
def test_examples_are_calls(examples):
    refused(convert, bert(), RANK, examples=examples, match="allowed: a list of dicts")


def test_a_model_by_itself_is_wanted():
    with pytest.raises(ValueError, match="merge_and_unload"):
        convert(get_peft_model(bert(), LoraConfig(target_modules=["query"])), RANK)
    with pytest.raises(ValueError, match="PreTrainedModel by itself"):
        convert(torch.nn.Linear(2, 2), RANK)


def test_a_patched_model_is_refused():
    refused(convert, ha.patch_model(bert(), ha.ConeConfig()), RANK, match="unpatch_model")
    model = bert()
    model.config.hyperattn = HyperAttnConfig((ha.ConeConfig(gamma=2.0),)).to_dict()
    refused(convert, model, RANK, match="del model.config.hyperattn")


def test_a_second_conversion_for_a_mechanism_is_refused():
    with pytest.raises(ValueError, match="registered already"):
        register_conversion("collaborative", Conversion(None, None, None))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gptj", "falcon"])
def test_rotary_families_are_refused_with_the_reason(family):
    model = FAMILIES[family][0]()
    refused(convert, model, RANK, match="rotary positions")
    refused(ha.patch_model, model, ha.CollaborativeConfig(), match="rotary positions")


def test_unpatching_what_was_never_converted_says_so():
    refused(ha.unpatch_model, llama(), match="not patched")
