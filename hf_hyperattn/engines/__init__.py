"""Compute softmax(score)·V.

Engines know neither mechanisms nor Transformers. `reference` is the specification.
"""

from .dispatch import ENGINES, attention, available_engines, check_backend, register_engine
from .options import Options
from .score import (
    DOT,
    TERMS,
    DistanceTerm,
    PairScore,
    Points,
    ScoreTerm,
    Term,
    dot_score,
    register_term,
    repeat_heads,
    working_dtype,
)

__all__ = [
    "DOT",
    "ENGINES",
    "TERMS",
    "DistanceTerm",
    "Options",
    "PairScore",
    "Points",
    "ScoreTerm",
    "Term",
    "attention",
    "available_engines",
    "check_backend",
    "dot_score",
    "register_engine",
    "register_term",
    "repeat_heads",
    "working_dtype",
]
