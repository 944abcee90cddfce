"""`torch.jit.trace`: a trace serves other tokens, padding and lengths, as that of a stock model does."""

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.functional import cone_attention, hierarchical_attention, hyperbolic_attention
from tests.integration.models import TEXT, bert, llama, perturb
from tests.oracles.cases import qkv


def hat():
    return ha.convert(bert(hf.BertForMaskedLM), ha.HatConfig(segment_length=5)).eval()


def patched(config):
    model = ha.patch_model(llama(), config)
    perturb(model)
    return model.eval()


MODELS = {
    "hsa": lambda: patched(ha.HsaConfig(windows=(2, 4), near=2, sinks=1, refine_top_k=1)),
    "head_fusion": lambda: patched(
        ha.HeadFusionConfig()
    ),  # leaves grouped queries to torch's own kernels
    "trilinear": lambda: patched(ha.TrilinearConfig(windows=(4, 3))),
    "hat": hat,
}


def inputs(length: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask [2, length], the first row padded at its left."""
    ids = torch.randint(
        3, TEXT["vocab_size"], (2, length), generator=torch.Generator().manual_seed(length)
    )
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return ids, mask


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        model.config.use_cache = False
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask).logits


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_trace_serves_other_calls(name):
    torch.manual_seed(0)
    model = Logits(MODELS[name]())
    traced = torch.jit.trace(model, inputs(20, 3), check_trace=False)
    for length, padding in ((20, 3), (20, 6), (31, 2)):
        ids, mask = inputs(length, padding)
        found, expected = (call(ids, mask)[mask.bool()] for call in (traced, model))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def tied(q, k, v):
    windows = ha.Hierarchy.windows(20, (4,))
    return hierarchical_attention(q, k, v, hierarchy=windows, tying="both", enable_gqa=True)


FUNCTIONS = {  # name -> function, number of queries, and of keys in the trace and in a later call
    "cone": (
        lambda q, k, v: cone_attention(q, k, v, enable_gqa=True),
        1,
        (40, 70),
    ),  # as a generated token
    "hyperbolic": (lambda q, k, v: hyperbolic_attention(q, k, v, enable_gqa=True), 6, (20, 33)),
    "hsa": (tied, 20, (20, 20)),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_traced_function_serves_other_calls(name):
    function, queries, lengths = FUNCTIONS[name]
    given = [
        qkv(1, 4, 2, queries, n, dtype=torch.float32, seed=n + i) for i, n in enumerate(lengths)
    ]
    traced = torch.jit.trace(function, given[0], check_trace=False)
    torch.testing.assert_close(traced(*given[1]), function(*given[1]), rtol=0, atol=1e-6)
