"""Tiny models of every served family: `MODELS[name]()` gives (model, inputs)."""

from .build import ids, padded
from .decoders import DECODERS
from .encoders import ENCODERS
from .pairs import PAIRS
from .speech import SPEECH
from .vision import VISION

TEXT = DECODERS | ENCODERS


def _with_ids(make):
    return lambda: (make(), ids())


MODELS = {name: _with_ids(make) for name, make in TEXT.items()} | VISION | SPEECH | PAIRS

__all__ = ["DECODERS", "ENCODERS", "MODELS", "TEXT", "ids", "padded"]
