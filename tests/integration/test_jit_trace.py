"""`torch.jit.trace`: a trace serves other tokens, padding and lengths, as that of a stock model does."""

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha

from .models import TEXT, bert, llama, perturb


def hat():
    return ha.convert(bert(hf.BertForMaskedLM), ha.HatConfig(segment_length=5)).eval()


def patched(config):
    model = ha.patch_model(llama(), config)
    perturb(model)
    return model.eval()


MODELS = {
    "hsa": lambda: patched(ha.HsaConfig(windows=(2, 4), near=2, sinks=1, refine_top_k=1)),
    "head_fusion": lambda: patched(ha.HeadFusionConfig()),  # leaves grouped queries to torch's own kernels
    "trilinear": lambda: patched(ha.TrilinearConfig(windows=(4, 3))),
    "hat": hat,
}


def inputs(length: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask [2, length], the first row padded at its left."""
    ids = torch.randint(3, TEXT["vocab_size"], (2, length), generator=torch.Generator().manual_seed(length))
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
