"""What each model type of the installed Transformers is to the attention interface, read from its source files.

Nothing is imported but names: the modelling files are searched as text, which takes about a second for all of them.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto

from .refused import REFUSED
from .table import FAMILIES

CALL = "ALL_ATTENTION_FUNCTIONS.get_interface("
_PARTS = re.compile(
    r"\bAutoModel\w*\._?from_config|^from \.\.\w+\.modeling_\w+ import", re.MULTILINE
)
_ATTENTION = re.compile(r"^class \w*(?:Attention|Attn)\w*\(", re.MULTILINE)


@cache
def modelling_files() -> dict[str, str]:
    """Text of every modelling file of Transformers by its stem, such as "modeling_bloom"."""
    root = Path(transformers.__file__).parent / "models"
    return {
        path.stem: path.read_text(encoding="utf-8") for path in sorted(root.glob("*/modeling_*.py"))
    }


@cache
def _owners() -> dict[str, str]:
    pattern = re.compile(r"^class (\w+)\(", re.MULTILINE)
    return {
        name: stem for stem, text in modelling_files().items() for name in pattern.findall(text)
    }


def model_types() -> dict[str, list[str]]:
    """The class names of every model type in the base and the causal-LM mapping."""
    found: dict[str, list[str]] = {}
    for mapping in (
        modeling_auto.MODEL_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        for model_type, names in mapping.items():
            found.setdefault(model_type, []).extend([names] if isinstance(names, str) else names)
    return found


def state(model_type: str) -> str:
    """What becomes of a model type of the two mappings.

    routed: its modelling file calls the attention interface. served: by a file of this package, in the installed
    Transformers. composite: no attention of its own, built of other models. refused: in `REFUSED`. unknown: none of
    these, which a test forbids.
    """
    if model_type in REFUSED:
        return "refused"
    if model_type in FAMILIES and _has_routed_class(*FAMILIES[model_type]):
        return "served"
    texts = [
        modelling_files()[_owners()[name]]
        for name in model_types()[model_type]
        if name in _owners()
    ]
    if any(CALL in text for text in texts):
        return "routed"
    if any(_PARTS.search(text) and not _ATTENTION.search(text) for text in texts):
        return "composite"
    return "unknown"


def _has_routed_class(stem: str, file: str) -> bool:
    """Whether one of our files has a route for a class of a modelling file that does not call the interface itself."""
    routes = importlib.import_module(f"{__package__}.{file}").ROUTES
    classes = re.split(r"^(?=class )", modelling_files()[f"modeling_{stem}"], flags=re.MULTILINE)[
        1:
    ]
    names = {re.split(r"\W", source, maxsplit=2)[1]: source for source in classes}
    return any(name in routes and CALL not in source for name, source in names.items())
