"""Measurements of a model: perplexity, speed, memory, attention, and the use of heads.

Each module has one kind of measurement; the names below are the public ones.
"""

from .attention import attention_report
from .cost import Generation, PeakMemory, measure_generation
from .heads import HeadRecord, HeadUsage, dropped_heads, head_usage, record_heads
from .hsa_certificate import LayerLoss, certificate
from .perplexity import Perplexity, max_logit_difference, next_token_logits, perplexity

__all__ = [
    "Generation",
    "HeadRecord",
    "HeadUsage",
    "LayerLoss",
    "PeakMemory",
    "Perplexity",
    "attention_report",
    "certificate",
    "dropped_heads",
    "head_usage",
    "max_logit_difference",
    "measure_generation",
    "next_token_logits",
    "perplexity",
    "record_heads",
]
