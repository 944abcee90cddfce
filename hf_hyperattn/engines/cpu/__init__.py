"""Attention in C++ tiles on the CPU, float32 and bfloat16, forward and backward (see operator.py and core.cpp)."""

from .choice import attend, hindrance, suits

__all__ = ["attend", "hindrance", "suits"]
