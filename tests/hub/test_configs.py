"""Every config in `hub_cards/configs` patches its base, at the base's own numbers of heads, and comes back exactly."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
import hub_cards

from ..integration.models import image_inputs

CONFIGS = Path(hub_cards.__file__).parent / "configs"
BASES = json.loads((CONFIGS / "bases.json").read_text(encoding="utf-8"))
#: Left to `make test-more`: other decoders and another encoder are tested with every change.
ALIKE = ("smollm2-135m", "qwen3-0.6b", "mistral-7b", "roberta-base")
#: What makes a base tiny: all but its family, its heads and how it attends.
DECODER = dict(head_dim=8, num_hidden_layers=3, vocab_size=99, intermediate_size=32)
ENCODER = dict(hidden_size=96, num_hidden_layers=3, vocab_size=99, intermediate_size=32)
WHISPER = dict(
    d_model=96,
    encoder_layers=3,
    decoder_layers=3,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    vocab_size=99,
    num_mel_bins=8,
    max_source_positions=40,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def tiny(base: str) -> torch.nn.Module:
    """A random model of the base's family with its real numbers of heads."""
    about = BASES[base]
    sizes = DECODER if "CausalLM" in about["auto_class"] else ENCODER
    if about["config"]["model_type"] == "vit":
        sizes = {k: v for k, v in sizes.items() if k != "vocab_size"} | dict(
            image_size=16, patch_size=4
        )
    if about["config"]["model_type"] == "whisper":
        sizes = WHISPER
    if sizes is DECODER:
        sizes = sizes | dict(hidden_size=8 * about["config"]["num_attention_heads"])
    if "sliding_window" in about["config"]:
        sizes = sizes | dict(num_hidden_layers=6)  # of which Gemma's last sees everything
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(**{**IDS, **about["config"], **sizes})
    model = getattr(hf, about["auto_class"]).from_config(config).eval()
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # at the default 0.02 all attention is even, whatever changes it
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def inputs(base: str, mechanism: str) -> dict:
    """What the base runs on, long enough for the mechanism to change something; the first row is padded."""
    kind, generator = BASES[base]["config"]["model_type"], torch.Generator().manual_seed(1)
    if kind == "vit":
        return image_inputs()
    length = 450 if mechanism == "hsa" and "CausalLM" in BASES[base]["auto_class"] else 40
    ids = torch.randint(5, 90, (1 if length > 40 else 2, length), generator=generator)
    if kind == "whisper":
        return dict(
            input_features=torch.randn(2, 8, 80, generator=generator), decoder_input_ids=ids
        )
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return dict(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize(
    "base", [pytest.param(b, marks=[pytest.mark.slow] * (b in ALIKE)) for b in BASES]
)
def test_patches_saves_and_reloads(base, tmp_path):
    stock = tiny(base)
    for mechanism in sorted(folder.name for folder in (CONFIGS / base).iterdir()):
        config = ha.HyperAttnConfig.from_pretrained(hub_cards.config_folder(base, mechanism))
        assert [m.mechanism for m in config.mechanisms] == [mechanism]
        given = inputs(base, mechanism)
        with torch.no_grad():
            before = stock(**given).logits
            model = ha.patch_model(tiny(base), config)
            assert (model(**given).logits - before).abs().max() <= 1e-5, mechanism
            torch.manual_seed(1)
            added = [p for n, p in model.named_parameters() if ".hyper." in n]
            for parameter in added:
                parameter.add_(torch.randn_like(parameter))
            out = model(**given).logits
            assert added and (out - before).abs().max() > 1e-4, f"{mechanism} changes nothing"
            model.save_pretrained(tmp_path / mechanism)
            again = (
                getattr(hf, BASES[base]["auto_class"]).from_pretrained(tmp_path / mechanism).eval()
            )
            assert torch.equal(again(**given).logits, out), mechanism


def test_every_mechanism_that_patches_is_there_for_every_base():
    names = {m["name"] for m in ha.list_mechanisms()}
    for base in BASES:
        assert {f.name for f in (CONFIGS / base).iterdir()} <= names - {"hat"}
    assert {f.name for f in CONFIGS.iterdir()} == {*BASES, "bases.json"}


@pytest.mark.parametrize(
    "wrong", [("llama-4", "cone"), ("bert-base", "hat"), ("../x", "cone"), ("bert-base", "")]
)
def test_what_is_not_there_is_one_line_with_what_is(wrong):
    with pytest.raises(ValueError, match="allowed: .*(bert-base|cone)") as raised:
        hub_cards.config_folder(*wrong)
    assert "\n" not in str(raised.value)
