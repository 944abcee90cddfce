"""Forty model types of many kinds through the zoo's checks: what `make zoo` does for all of them."""

import pytest

from tests.zoo import worker
from tests.zoo.forks import run_forked
from tests.zoo.run import result_of

CAUSAL = (
    "llama gpt2 mistral gemma2 gpt_oss qwen3 phi3 mixtral opt gpt_neox olmo2 cohere starcoder2 smollm3 deepseek_v32 "
    "jamba bloom mpt falcon gptj gpt_neo codegen"
).split()
BASE = "bert distilbert modernbert deberta-v2 mpnet vit clip swin dinov2 siglip bart t5 whisper wav2vec2 wavlm".split()
REFUSED = {"resnet": "no attention", "mamba": "no attention", "longformer": "refused"}
ITEMS = [("causal", t) for t in CAUSAL] + [("base", t) for t in (*BASE, *REFUSED)]


@pytest.fixture(scope="module")
def results():
    worker.prepare()
    return {item: result_of(reply, s) for item, reply, s in run_forked(worker.answer, ITEMS, 1, 120)}


@pytest.mark.parametrize("kind, model_type", ITEMS, ids=[t for _, t in ITEMS])
def test_type(results, kind, model_type):
    result = results[kind, model_type]
    assert result["verdict"] == REFUSED.get(model_type, "works"), result["why"] or result["checks"]
