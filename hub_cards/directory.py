"""The card of a saved model, adapter or config: read from its directory, written beside the weights."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from .render import render_adapter_card, render_config_card, render_model_card
from .results import is_hub_id
from .tasks import adapter_task, task_of
from .weights import count_parameters

CONFIG_NAME = "hyperattn_config.json"  # what HyperAttnConfig.save_pretrained writes
ADAPTER_TYPE = (
    "HF_HYPERATTN_"  # stands before the peft_type of adapters that plain PEFT must not load
)


def hub_id_or_none(name: object) -> str | None:
    """``name`` if it is an ``owner/name`` id on the Hub, None if it is empty or a path.

    Transformers keeps the argument of ``from_pretrained`` as a model's name, and a path must not be published
    as a base model. Names without an owner are taken for directories, and so are a Trainer's checkpoints.
    """
    path = (
        not isinstance(name, str)
        or not is_hub_id(name)
        or "/" not in name
        or os.path.exists(name)
        or re.search(r"/checkpoint-\d+$", name)
    )
    return None if path else str(name)


def config_folder(base: str, mechanism: str) -> Path:
    """The folder of a tested config that comes with this package, for ``HyperAttnConfig.from_pretrained``.

    Args:
        base: a model that it is made for, such as ``smollm2-135m``; ``configs/bases.json`` says which it is.
        mechanism: the mechanism's name, such as ``cone``.

    Raises:
        ValueError: there is none; the message lists what there is.
    """
    configs = Path(__file__).parent / "configs"
    for value, folder in ((base, configs), (mechanism, configs / str(base))):
        known = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if value not in known:
            raise ValueError(f"hub_cards: no config for {value!r}; allowed: {', '.join(known)}")
    return configs / base / mechanism


def _read_json(path: Path) -> dict:
    """The object in a JSON file, {} where the file is missing; ValueError where it is not an object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"hub_cards: {path} is not JSON: {why}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"hub_cards: {path} holds a {type(content).__name__}; allowed: a JSON object"
        )
    return content


def card_for_directory(directory, *, config: Mapping | None = None, **facts):
    """Render the card of a saved directory from the files in it.

    Args:
        directory: what ``save_pretrained`` wrote: config.json with ``hyperattn`` (a model), or
            adapter_config.json (a PEFT adapter).
        config: the ``hyperattn`` dict, where no file of the directory holds it (an adapter, a config of its
            own).
        **facts: fields of ``Facts``; they win over what the files say.

    Returns:
        ``huggingface_hub.ModelCard``.

    Raises:
        ValueError: nothing says how the attention was changed, a file is not JSON, or a fact has no place in
            a card.
    """
    directory = Path(directory)
    model, adapter = (
        _read_json(directory / "config.json"),
        _read_json(directory / "adapter_config.json"),
    )
    config = config or model.get("hyperattn") or _read_json(directory / CONFIG_NAME)
    if not config:
        raise ValueError(
            f"hub_cards: {directory} has neither {CONFIG_NAME} nor 'hyperattn' in config.json; save a "
            "patched model there, or pass config="
        )
    added, total = count_parameters(directory)
    found: dict[str, object] = (
        {"parameters_added": added, "parameters_total": total} if total else {}
    )
    if adapter:
        if isinstance(adapter.get("peft_type"), str):
            adapter["peft_type"] = adapter["peft_type"].removeprefix(ADAPTER_TYPE)
        found["auto_class"], found["pipeline_tag"] = adapter_task(adapter)
        found["base_model"] = hub_id_or_none(adapter.get("base_model_name_or_path"))
        return render_adapter_card(config, adapter=adapter, **{**found, **facts})
    if not model:
        return render_config_card(config, **facts)
    architectures = model.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) for name in architectures
    ):
        path = directory / "config.json"
        raise ValueError(
            f"hub_cards: {path} has architectures={str(architectures)[:80]}; allowed: a list of names"
        )
    found["auto_class"], found["pipeline_tag"] = task_of(next(iter(architectures), None))
    found["tokenizer"] = (directory / "tokenizer_config.json").is_file()
    return render_model_card(config, **{**found, **facts})
