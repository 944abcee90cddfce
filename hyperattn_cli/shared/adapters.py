"""Find and load adapters: folders with adapter_config.json and no model of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_hyperattn.integration.loading.checkpoint_files import errors_as
from hf_hyperattn.utils.files import read_json
from hf_hyperattn.utils.text import short

ADAPTER = "adapter_config.json"


def is_adapter(path: str) -> bool:
    """Return whether a path is the folder of an adapter."""
    folder = Path(path).expanduser()
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def find_base(folder: str | Path) -> str:
    """Return the base model that an adapter names: a folder or a Hub id.

    Raises:
        ValueError: It names none.
    """
    file = Path(folder).expanduser() / ADAPTER
    base = read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"{file} has base_model_name_or_path={short(base)}; allowed: the name of its base"
        )
    return base


def load_adapter(folder: str | Path, **settings: Any) -> Any:
    """Load the base model of an adapter, and the adapter on it.

    Args:
        folder: The adapter.
        settings: For `from_pretrained` of the base; by default it keeps its dtype.
    """
    import transformers
    from peft import PeftModel

    from hub_cards.tasks import adapter_task

    base = find_base(folder)
    # The base model must have the head that the adapter was trained with.
    auto = getattr(transformers, adapter_task(read_json(Path(folder).expanduser() / ADAPTER))[0])
    with errors_as(f"its base {base!r} cannot be loaded"):
        model = auto.from_pretrained(base, **{"dtype": "auto"} | settings)
    with errors_as(f"{folder}: cannot load this adapter"):
        return PeftModel.from_pretrained(model, str(Path(folder).expanduser()))
