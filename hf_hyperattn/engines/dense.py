"""Decide when the whole matrix of logits is faster than tiles.

The thresholds were measured with umbral, geodesic and dot-product scores on one core, for 1 to 512
sequences of 16 to 512 tokens and for single queries, forward and in training (docs/performance.md).
"""

from __future__ import annotations

#: Calling a compiled engine takes 0.2 ms for any shape. The dense engine computes this many logits
#: in that time.
COMPILED = 2**11
#: The same for a few queries against many keys, where the compiled engine is called with less
#: overhead.
DECODED = 2**9
#: For more logits than this, the compiled engine computes a plain dot product in 0.3x to 0.7x the
#: time of SDPA.
PLAIN = 2**16
#: The blockwise engine takes 0.1 ms per tile (forward) or 0.3 ms (training), and at least one tile
#: per sequence. The dense engine computes this many logits of a sequence in that time.
FORWARD, TRAINING = 2**12, 2**13
#: Most logits that the dense engine may hold: it keeps several such matrices, each 16 MiB in
#: float32.
MOST = 2**22


def is_fastest(shape: tuple[int, int, int, int], training: bool, compiled: bool) -> bool:
    """Return whether the dense engine is the fastest.

    Args:
        shape: Shape (B, H, N, M) of the logits.
        training: Whether a backward pass will follow.
        compiled: Whether a compiled engine supports the call. If not, the alternative is the
            blockwise engine.
    """
    batch, heads, queries, keys = shape
    per_sequence = heads * queries * keys
    total = batch * per_sequence
    if compiled:
        return total <= COMPILED
    limit = TRAINING if training else FORWARD
    return per_sequence <= limit and total <= MOST
