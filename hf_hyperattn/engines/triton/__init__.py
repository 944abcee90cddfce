"""The GPU engine: Triton kernels with their own backward pass.

    serve.py       what the engine can serve; a call's tensors as the operators take them
    operator.py    the operators of torch and their gradients
    launch.py      from tensors to launched kernels; configs.py: tile sizes
    forward.py, backward.py, tile.py   the kernels
    terms.py       what rooms give; compose.py: from a score's key to Triton functions

Importing the package does not import Triton.
"""

from .serve import attend, compute, supports, unsupported_reason

__all__ = ["attend", "compute", "supports", "unsupported_reason"]
