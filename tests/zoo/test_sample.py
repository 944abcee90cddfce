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
ALWAYS = "llama bloom bert t5 resnet longformer".split()


@pytest.fixture(scope="module", autouse=True)
def prepared():
    worker.prepare()


@pytest.mark.parametrize(
    "kind, model_type",
    [
        pytest.param(*item, id=item[1], marks=[] if item[1] in ALWAYS else pytest.mark.slow)
        for item in ITEMS
    ],
)
def test_type(kind, model_type):
    ((_, reply, seconds),) = run_forked(worker.answer, [(kind, model_type)], 1, 120)
    result = result_of(reply, seconds)
    assert result["verdict"] == REFUSED.get(model_type, "works"), result["why"] or result["checks"]
