"""Talking heads on real checkpoints: at no cost to begin with, exact when reloaded, and back."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hf_hyperattn import TalkingHeadsConfig
from tests.integration.test_real import minilm, smol, tokens  # noqa: F401  fixtures

from . import heads_in_models as shared

pytestmark = pytest.mark.slow


def test_smollm2(smol, tmp_path):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    shared.real_checkpoint(model, tokens(smol), TalkingHeadsConfig(), tmp_path)


def test_smollm2_generates(smol):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    shared.real_generation(model, tokens(smol), TalkingHeadsConfig())


def test_minilm(minilm, tmp_path):  # noqa: F811
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    shared.real_checkpoint(model, tokens(minilm), TalkingHeadsConfig(), tmp_path)
