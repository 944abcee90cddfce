"""Measures of a model: how well it predicts a text, how fast it is, how much memory it takes."""

from .cost import Generation, PeakMemory, measure_generation
from .fidelity import max_logit_difference, next_token_logits
from .perplexity import Perplexity, perplexity

__all__ = [
    "Generation",
    "PeakMemory",
    "Perplexity",
    "max_logit_difference",
    "measure_generation",
    "next_token_logits",
    "perplexity",
]
