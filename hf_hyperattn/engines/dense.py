"""When the whole matrix of logits is the fastest way: where an engine of tiles has more to do than to compute.

Measured against the other engines with umbral, geodesic and dot-product scores on one core, 1 to 512 sequences of 16 to
512 tokens and single queries, forward and in training (docs/performance.md).
"""

from __future__ import annotations

#: A compiled engine takes 0.2 ms to be called, whatever the shape; so does the dense engine for this many logits.
COMPILED = 2**11
#: With a few queries against many keys it takes less.
DECODED = 2**9
#: For more logits than this the compiled engine does a plain dot product in a third to two thirds of SDPA's time.
PLAIN = 2**16
#: The blockwise engine takes 0.1 ms a tile in forward, 0.3 ms in training, and cuts at least one from each sequence.
#: The dense engine does this many logits of a sequence in that time.
FORWARD, TRAINING = 2**12, 2**13
#: Many short sequences make a matrix of this size, of which the dense engine holds several: 16 MiB each in float32.
MOST = 2**22


def pays(shape: tuple[int, int, int, int], training: bool, compiled: bool) -> bool:
    """Whether the dense engine is the fastest.

    Args:
        shape: of the logits, (B, H, N, M).
        training: whether there will be a backward pass.
        compiled: whether a compiled engine can do the call; else the blockwise engine would.
    """
    batch, heads, queries, keys = shape
    one = heads * queries * keys
    if compiled:
        return batch * one <= COMPILED
    return one <= (TRAINING if training else FORWARD) and batch * one <= MOST
