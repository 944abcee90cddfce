"""Where tokens stand is worked out once for all layers of a model, and reads what the definition reads."""

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.engines.selection import Places
from hf_hyperattn.mechanisms.selection import places
from hf_hyperattn.rules import Pages
from tests.mechanisms.test_packed_and_prefix import TEXT, tokens

MECHANISMS = {
    "hsa": ha.HsaConfig((2, 4), refine_top_k=1),
    "sparse": ha.SparseConfig(Pages(near=4, sinks=1, page=4, top=1, query="previous", chunk=4)),
    "hype": ha.HypeConfig(),
    "mkl": ha.MklConfig(kind="conditional"),
    "trilinear": ha.TrilinearConfig(windows=(5, 3)),
}


@pytest.mark.parametrize("inference", [False, True], ids=["no grad", "inference mode"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_places_are_found_once_a_model_call(monkeypatch, mechanism, padding, inference):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, "num_hidden_layers": 5})).eval()
    ha.patch_model(model, MECHANISMS[mechanism], mode="replace" if mechanism in ("hsa", "sparse") else "blend")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.fill_(0.1)
    found, find = [], places.Reading._find_places
    monkeypatch.setattr(places.Reading, "_find_places", lambda reading: found.append(reading) or find(reading))
    places.facts_without_mask.cache_clear()
    ids, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[1, :padding] = 0
    cache = hf.DynamicCache(config=model.config)
    with torch.inference_mode() if inference else torch.no_grad():
        for stop in (20, 21):
            del found[:]
            given = ids[:, cache.get_seq_length() : stop]
            model(given, attention_mask=mask[:, :stop] if padding else None, past_key_values=cache)
            assert len(found) == 1, stop


def test_numbers_count_real_tokens():
    real = torch.tensor([[0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    here = Places(1, 2, 5, torch.device("cpu"), start=2, dropped=1, real=real)
    assert here.numbers.tolist() == [[-1, 0, 1, -1, 2, -1]]
    assert here.key_numbers.tolist() == [[0, 1, -1, 2, -1]] and here.query_numbers.tolist() == [[-1, 2]]
    assert here.stop == 4 and here.spans is None
    assert here.count_slots(5, 1) == 1 and here.count_slots(5, 2) == 3 and here.count_slots(5, 9) == 4
    assert Places(2, 1, 4, torch.device("cpu"), start=3).spans == ([0, 0], [4, 4])


def test_a_mask_that_is_changed_in_place_is_read_again():
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    read = lambda: places.read_mask(query, key, ha.engines.Options(mask=mask), True).places.real
    assert read() is None
    mask[..., 0] = False
    assert read().tolist() == [[False, True, True, True]]
