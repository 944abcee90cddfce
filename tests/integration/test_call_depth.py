"""How few files of ours a call enters: engine, layout and options are found out once, not at every call."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.engines import dispatch
from tests.engines.test_native import needs_compiler

ROOT = str(Path(ha.__file__).parent)


def model(patched: bool) -> LlamaForCausalLM:
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    if not patched:
        made.set_attn_implementation("cone")
        return made
    ha.patch_model(made, ha.ConeConfig())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".hyper." in name:
                parameter.fill_(0.3)
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


@needs_compiler
@pytest.mark.parametrize("patched", [False, True], ids=["by name", "patched"])
def test_a_call_is_resolved_once(patched):
    llama, ids = model(patched), torch.arange(256)[None] % 64
    with torch.no_grad():
        past = llama(ids, use_cache=True).past_key_values
        prefill, step = lambda: llama(ids, use_cache=False), lambda: llama(ids[:, :1], past_key_values=past)
        for call, most in ((prefill, 8), (step, 5)):
            call()
            known = len(dispatch.RESOLVED)
            seen = ours(call)
            names = [code.co_qualname if hasattr(code, "co_qualname") else code.co_name for code in seen]
            assert len({c.co_filename for c in seen}) <= most, names
            assert len(dispatch.RESOLVED) == known


@needs_compiler
def test_what_training_changes_is_read_afresh():
    llama, ids = model(True), torch.arange(40)[None] % 64
    with torch.no_grad():
        seen = [llama(ids).logits]
        for value in (0.0, 0.6, 0.3):  # at 0 the host's own attention runs
            for name, parameter in llama.named_parameters():
                if ".hyper." in name:
                    parameter.data.fill_(value)
            seen.append(llama(ids).logits)
        host = LlamaForCausalLM(llama.config.__class__.from_dict(ha.unpatch_model(llama).config.to_dict())).eval()
        host.load_state_dict(llama.state_dict())
        assert torch.equal(seen[1], host(ids).logits)
    assert not torch.equal(seen[0], seen[2]) and torch.equal(seen[0], seen[3])
