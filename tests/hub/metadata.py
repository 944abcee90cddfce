"""What the Hub checks in a model card's YAML header, as far as it is published; independent of ``hub_cards``.

Source: the model-card specification of the Hub (hub-docs ``modelcard.md``) and the ``/api/validate-yaml``
answers.
"""

import re

import yaml

HEADER = re.compile(r"\A---\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", re.S)
MODEL_ID = re.compile(r"\A([\w.-]+/)?[\w.-]{1,96}\Z")
LICENSES = {
    "apache-2.0",
    "mit",
    "openrail",
    "bigscience-openrail-m",
    "bsd-2-clause",
    "bsd-3-clause",
    "cc0-1.0",
    "cc-by-4.0",
    "cc-by-sa-4.0",
    "cc-by-nc-4.0",
    "gpl-3.0",
    "lgpl-3.0",
    "mpl-2.0",
    "afl-3.0",
    "llama3.1",
    "gemma",
    "unknown",
    "other",
}
RELATIONS = {"adapter", "finetune", "quantized", "merge"}


def read_header(content: str) -> dict:
    """The YAML header of a card as a dict; ValueError where there is none or it is not a mapping."""
    match = HEADER.match(content)
    if match is None:
        raise ValueError("no YAML header")
    try:
        header = yaml.safe_load(match.group(1))
    except yaml.YAMLError as error:
        raise ValueError(f"YAML does not parse: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("YAML header is not a mapping")
    return header


def _strings(value) -> list:
    return value if isinstance(value, list) else [value]


def _index_errors(index) -> list[str]:
    needed = {"task": ("type",), "dataset": ("type", "name")}
    errors = []
    for model in index:
        if not isinstance(model.get("name"), str):
            errors.append('"model-index[0].name" is required')
        for result in model.get("results", []):
            errors += [
                f'"model-index.results.{part}.{key}" is required'
                for part, keys in needed.items()
                for key in keys
                if not isinstance(result.get(part, {}).get(key), str)
            ]
            errors += [
                '"metrics.value" is required'
                for metric in result["metrics"]
                if "value" not in metric
            ]
    return errors


def card_errors(content: str) -> list[str]:
    """Messages for everything the Hub would refuse; empty where the card is valid."""
    try:
        header = read_header(content)
    except ValueError as error:
        return [str(error)]
    errors = []
    licence = header.get("license")
    if licence is not None and licence not in LICENSES:
        errors.append(f'"license" must be one of the known identifiers, got {licence!r}')
    if licence == "other" and not header.get("license_name"):
        errors.append('"license_name" is required with license "other"')
    for model in _strings(header.get("base_model", [])):
        if not isinstance(model, str) or not MODEL_ID.match(model):
            errors.append(
                f'"base_model" with value {model!r} is not valid. Use a model id from https://hf.co/models.'
            )
    if header.get("base_model_relation", "finetune") not in RELATIONS:
        errors.append('"base_model_relation" must be one of adapter, finetune, quantized, merge')
    for key in ("tags", "datasets", "metrics", "language"):
        if any(
            not isinstance(entry, str) or not entry for entry in _strings(header.get(key) or [])
        ):
            errors.append(f'"{key}" must be a list of strings')
    for key in ("library_name", "pipeline_tag"):
        if key in header and not isinstance(header[key], str):
            errors.append(f'"{key}" must be a string')
    return errors + _index_errors(header.get("model-index") or [])
