"""How few files of ours a call enters: engine, layout and options are found out once, not at every call."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.engines import dispatch
from hf_hyperattn.registry import get_mechanism
from hf_hyperattn.rules import Pages, Window
from tests.engines.test_native import needs_compiler

ROOT = str(Path(ha.__file__).parent)


def model(config) -> LlamaForCausalLM:
    """Patched with a config and its gates open; None: cone attention by name."""
    sizes = dict(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
    )
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    if config is None:
        made.set_attn_implementation("cone")
        return made
    ha.patch_model(
        made, config, mode="replace" if config.mechanism in ("hsa", "sparse") else "blend"
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".hyper." in name:
                parameter.add_(0.3)
    return made


def ours(call) -> list:
    """The functions of ours that run, in order."""
    seen = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            seen.append(frame.f_code)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


#: Of each mechanism, how many files of ours a prompt and a generated token enter. The goal is 8 for all.
MOST_FILES = {
    "cone": (8, 5),
    "hyperbolic": (13, 9),
    "hype": (16, 16),
    "hsa": (15, 15),
    "sparse": (17, 17),
    "head_fusion": (14, 10),
    "talking_heads": (11, 10),
    "mkl": (12, 9),
    "trilinear": (16, 17),
}
CONFIGS = {
    "hsa": ha.HsaConfig(windows=(16, 64)),
    "sparse": ha.SparseConfig(rules=[Window(near=16), Pages(top=2)] * 2),
}


@needs_compiler
@pytest.mark.parametrize("name", MOST_FILES)
def test_few_files_are_entered(name):
    """What a kind of call needs is found at its first call: engine, layout and options."""
    config = CONFIGS.get(name) or get_mechanism(name).config()
    llama, ids = model(config), torch.arange(256)[None] % 64
    with torch.no_grad():
        llama(ids, use_cache=False)
        past = llama(ids, use_cache=True).past_key_values
        prefill, step = (
            lambda: llama(ids, use_cache=False),
            lambda: llama(ids[:, :1], past_key_values=past),
        )
        for call, most in zip((prefill, step), MOST_FILES[name], strict=True):
            call()
            known = len(dispatch.RESOLVED)
            files = {code.co_filename for code in ours(call)}
            assert len(files) <= most, sorted(files)
            assert len(dispatch.RESOLVED) == known


@needs_compiler
def test_few_files_are_entered_by_name():
    llama, ids = model(None), torch.arange(256)[None] % 64
    with torch.no_grad():
        llama(ids, use_cache=False)
        assert len({code.co_filename for code in ours(lambda: llama(ids, use_cache=False))}) <= 8


@needs_compiler
def test_what_training_changes_is_read_afresh():
    llama, ids = model(ha.ConeConfig()), torch.arange(40)[None] % 64
    with torch.no_grad():
        seen = [llama(ids).logits]
        for value in (0.0, 0.6, 0.3):  # at 0 the host's own attention runs
            for name, parameter in llama.named_parameters():
                if ".hyper." in name:
                    parameter.data.fill_(value)
            seen.append(llama(ids).logits)
        host = LlamaForCausalLM(
            llama.config.__class__.from_dict(ha.unpatch_model(llama).config.to_dict())
        ).eval()
        host.load_state_dict(llama.state_dict())
        assert torch.equal(seen[1], host(ids).logits)
    assert not torch.equal(seen[0], seen[2]) and torch.equal(seen[0], seen[3])
