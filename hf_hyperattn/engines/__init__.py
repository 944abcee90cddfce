"""Engines compute softmax(score)·V; they know no mechanism and no Transformers. `reference` is the specification."""

from .choice import ENGINES, attention, available_engines, register_engine
from .options import Options
from .score import (
    DOT,
    TERMS,
    DistanceTerm,
    PairScore,
    Piece,
    Points,
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
    "Piece",
    "Points",
    "Term",
    "attention",
    "available_engines",
    "dot_score",
    "register_engine",
    "register_term",
    "repeat_heads",
    "working_dtype",
]
