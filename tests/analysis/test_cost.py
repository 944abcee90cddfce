"""Memory and generation measured on things of known size."""

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hyperattn.analysis import (
    PeakMemory,
    max_logit_difference,
    measure_generation,
    next_token_logits,
)

MIB = 2**20


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def test_peak_memory_sees_what_was_freed_again():
    with PeakMemory() as memory:
        block, end = torch.ones(64 * MIB, dtype=torch.uint8), time.monotonic() + 60
        while (
            memory.added < 60 * MIB and time.monotonic() < end
        ):  # until the thread that looks has had its turn
            time.sleep(0.01)
        del block
    assert 60 * MIB < memory.added < 160 * MIB
    assert memory.peak == memory.start + memory.added


def test_peak_memory_stops_watching_after_an_error():
    with pytest.raises(KeyError):
        with PeakMemory() as memory:
            raise KeyError
    assert not memory._thread.is_alive()


@pytest.mark.gpu
def test_peak_memory_on_a_gpu():
    with PeakMemory("cuda") as memory:
        torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    assert memory.added == 64 * MIB


def test_generation_is_the_argmax_of_the_full_forward(model):
    model.train()
    prompt = [3, 1, 4]
    steps = []
    got = measure_generation(model, prompt, 6, on_token=lambda: steps.append(1))
    assert model.training and len(steps) == 6
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(next_token_logits(model, tokens)[-1].argmax()))
    assert list(got.ids) == tokens[3:]
    assert got.tokens_per_second == pytest.approx(6 / got.seconds)


@pytest.mark.parametrize("prompt, new", [([], 3), ([1], 0)])
def test_generation_refusals(model, prompt, new):
    with pytest.raises(ValueError, match="allowed: at least 1"):
        measure_generation(model, prompt, new)


def test_logit_difference():
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert max_logit_difference(a, a + torch.tensor([0.0, -0.5])) == 0.5
    assert max_logit_difference(a, a * float("nan")) != max_logit_difference(a, a)
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(2, 1\)"):
        max_logit_difference(a, a[:, :1])
