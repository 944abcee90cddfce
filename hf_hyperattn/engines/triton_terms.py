"""The plain dot product as a Triton function (see triton/terms.py)."""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401  the interpreter looks for it

from .triton.terms import TritonTerm


@triton.jit
def dot_value(dot, gap, near, noise):
    """The product itself."""
    return dot


@triton.jit
def dot_pull(grad, dot, gap, near, noise):
    """Its gradient is the logits'."""
    return (grad,)


TRITON_TERMS = {"dot": TritonTerm(dot_value, dot_pull)}
