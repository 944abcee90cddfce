"""Measures of a model: how well it predicts a text, how fast it is, how much memory it takes."""

from .cost import Generation, PeakMemory, measure_generation
from .fidelity import max_logit_difference, next_token_logits
from .hsa_certificate import LayerLoss, certificate
from .perplexity import Perplexity, perplexity

__all__ = [
    "Generation",
    "LayerLoss",
    "PeakMemory",
    "Perplexity",
    "certificate",
    "max_logit_difference",
    "measure_generation",
    "next_token_logits",
    "perplexity",
]
