"""A converted model that is built to be loaded: shared projections in place of those that its class makes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...mechanisms.collaborative.config import CollaborativeConfig
from ...mechanisms.collaborative.layer import SharedLayer
from ..checkpoint_config import inner, patched_hosts
from ..conversions import REBUILDERS
from .projections import SharedShape, projections, shared_modules


def shared_layer(host: Any) -> SharedLayer | None:
    """The layer of a converted host."""
    layer = getattr(inner(host.hyper), CollaborativeConfig.mechanism, None)
    return layer if isinstance(layer, SharedLayer) else None


def is_shared(model: PreTrainedModel) -> bool:
    """Whether some host of the model is converted."""
    return any(shared_layer(host) is not None for _, host in patched_hosts(model))


def rebuild(model: PreTrainedModel) -> None:
    """Shared projections in every host whose `hyper` says so, for weights that are loaded next.

    Raises:
        ValueError: a host has no projections that can be shared.
    """
    for name, host in patched_hosts(model):
        layer = shared_layer(host)
        if layer is None:
            continue
        old = projections(host)
        if old is None:
            raise ValueError(
                f"config.hyperattn says that {name} was converted, and it has no projections that can be shared; "
                "allowed: the config that was saved with the model"
            )
        for child, module in shared_modules(old, SharedShape.of(old, *layer.mixing.shape[::-1])).items():
            setattr(host, child, module)


REBUILDERS[CollaborativeConfig.mechanism] = rebuild
