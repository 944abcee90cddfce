"""How many functions of ours run where a patched model is loaded: few, and few more for each further layer."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from tests.integration.models import llama

PACKAGE = str(Path(ha.__file__).parent)
#: Of one layer, and of each further one. Classes are read anew at each load, since libraries replace their methods.
MOST, MOST_A_LAYER = 430, 105
#: Of a model that is none of ours.
MOST_OF_STOCK = 80


def calls(function) -> int:
    """Calls of Python functions of the package while `function` runs."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "load", [hf.LlamaForCausalLM, hf.AutoModelForCausalLM], ids=["class", "auto"]
)
def test_loading_a_patched_model(load, tmp_path):
    counts = []
    for layers in (1, 3):
        folder = tmp_path / str(layers)
        ha.patch_model(llama(num_hidden_layers=layers), ha.ConeConfig()).save_pretrained(folder)
        load.from_pretrained(folder)
        counts.append(calls(lambda: load.from_pretrained(folder)))  # noqa: B023
    assert counts[0] <= MOST and counts[1] - counts[0] <= 2 * MOST_A_LAYER, counts


def test_loading_a_model_that_is_not_ours(tmp_path):
    llama(num_hidden_layers=1).save_pretrained(tmp_path)
    hf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert calls(lambda: hf.LlamaForCausalLM.from_pretrained(tmp_path)) <= MOST_OF_STOCK


def test_a_model_knows_what_it_is_built_into_also_after_a_failure():
    """A part leaves its patch to the model around it; one that failed to be built is around nothing."""
    config = ha.patch_model(llama(num_hidden_layers=1), ha.ConeConfig()).config

    class Failing(hf.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.inside = hf.LlamaModel(config)
            assert not [name for name, _ in self.inside.named_modules() if name.endswith("hyper")]
            raise KeyError("on purpose")

    with pytest.raises(KeyError) as failure, torch.no_grad():
        Failing(config)
    assert failure.traceback  # it keeps the half-built model alive
    alone = hf.LlamaModel(config)
    assert [name for name, _ in alone.named_modules() if name.endswith("hyper")] == [
        "layers.0.self_attn.hyper"
    ]


LATE = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
import hf_hyperattn as ha
sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
config = ha.patch_model(LlamaForCausalLM(LlamaConfig(**sizes)), ha.ConeConfig()).config
for cls in (LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel):
    names = [name for name, _ in cls(config).named_modules() if name.endswith("hyper")]
    assert names == ["model." * (cls is not LlamaModel) + "layers.0.self_attn.hyper"], (cls, names)
"""


def test_model_classes_that_were_there_before_the_package():
    """One of them has its `__init__` from a mixin that is no model."""
    subprocess.run([sys.executable, "-c", LATE], check=True, timeout=300)
