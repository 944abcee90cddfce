"""Registering for a while: what a test registers is forgotten after it."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import AttentionInterface, AttentionMaskInterface

from hf_hyperattn.config import configs as config
from hf_hyperattn.engines import ENGINES, TERMS, dispatch
from hf_hyperattn.engines.score import parse_score_key
from hf_hyperattn.integration.attention import by_name
from hf_hyperattn.integration.attention.stock import OURS
from hf_hyperattn.registry import MECHANISMS

TABLES = (
    MECHANISMS,
    TERMS,
    ENGINES,
    AttentionInterface._global_mapping,
    AttentionMaskInterface._global_mapping,
)


@contextmanager
def restored() -> Iterator[None]:
    """Inside, mechanisms, scores and engines may be registered; afterwards the registries are as they were."""
    clear()
    before, ours = [dict(table) for table in TABLES], set(OURS)
    try:
        yield
    finally:
        for table, entries in zip(TABLES, before, strict=True):
            table.clear()
            table.update(entries)
        OURS.intersection_update(ours)
        clear()


def clear() -> None:
    """Forget what was kept by name."""
    dispatch.RESOLVED.clear()
    for cache in (parse_score_key, config._read_record, by_name.build_named_layers):
        cache.cache_clear()
