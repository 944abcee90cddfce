"""A score as somebody else would write it: the dot product plus a learned constant times the cosine."""

import hf_hyperattn as ha


def define() -> None:
    """Register it."""

    @ha.score("toy_score")
    def toy_score(dot, query_norm, key_norm, weight=0.5):
        """q·k + c · cos(q, k)."""
        return dot + weight * dot / (query_norm * key_norm)
