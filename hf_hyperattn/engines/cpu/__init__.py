"""Attention in C++ tiles on the CPU, float32 and bfloat16, forward and backward (see operator.py and core.cpp)."""

from . import decode
from .choice import attend, hindrance, suits
from .norms import norms, squared_norms

__all__ = ["attend", "decode", "hindrance", "norms", "squared_norms", "suits"]
