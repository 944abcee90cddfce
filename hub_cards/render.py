"""The renderers: plain facts in, a ``huggingface_hub.ModelCard`` out.

The YAML header is made by ``ModelCardData``, the body by the Jinja templates beside this file, and both are
parsed back by ``ModelCard``, so a card that comes out of here is one that huggingface_hub can read.
"""

from collections.abc import Collection, Mapping
from typing import Any

from .escape import Safe, environment, flat
from .facts import Facts
from .generated import sign
from .results import eval_results
from .spec import refuse

PROJECT_TAG = "hf-hyperattn"


def card_data(facts: Facts, library_name: str, tags: list[str]):
    """The YAML header as ``ModelCardData``: base, licence, tags, task, data, measured numbers."""
    from huggingface_hub import ModelCardData

    relation: dict[str, Any] = (
        {"base_model_relation": facts.base_model_relation} if facts.base_model else {}
    )
    named = [flat(name) for name, _, _ in facts.mechanisms]
    return ModelCardData(
        language=facts.language
        if facts.language is None or isinstance(facts.language, str)
        else list(facts.language),
        license=facts.license,
        license_name=facts.license_name,
        license_link=facts.license_link,
        library_name=library_name,
        base_model=facts.base_model,
        pipeline_tag=facts.pipeline_tag,
        tags=[PROJECT_TAG, *named, *tags, *facts.tags],
        datasets=list(facts.datasets) if facts.datasets else None,
        metrics=list(dict.fromkeys(result.metric for result in facts.results)) or None,
        model_name=(facts.repo_id or "this model").split("/")[-1] if facts.results else None,
        eval_results=eval_results(facts.results) or None,
        **relation,
    )


def _render(template: str, facts: Facts, data):
    """Fill a template and sign the card, so that a later push can tell whether a person has edited it."""
    from huggingface_hub import ModelCard

    content = (
        environment()
        .get_template(template)
        .render(f=facts, metadata=Safe(data.to_yaml()), is_config=template.startswith("config"))
    )
    return sign(ModelCard(content))


def render_model_card(
    config: Mapping, base_model: str | None = None, license: str | None = None, results=None, **more
):
    """The card of a patched model.

    Args:
        config: the ``hyperattn`` dict of its config.json, or the whole config.json as a dict.
        base_model: Hub id of the model that was patched; None leaves the relation out of the header.
        license: licence identifier of the Hub; None says that none is stated.
        results: measured numbers (``Result`` or dicts of its fields); None or empty prints that there are
            none.
        **more: any other field of ``Facts``.

    Returns:
        ``huggingface_hub.ModelCard``; ``.save(path)`` writes it, ``.push_to_hub(repo_id)`` publishes it.

    Raises:
        ValueError: a value that has no place in a card. TypeError: an unknown field.
    """
    facts = Facts(config, base_model=base_model, license=license, results=results or (), **more)
    return _render("model.md.jinja", facts, card_data(facts, "transformers", []))


def render_adapter_card(
    config: Mapping,
    base_model: str | None = None,
    license: str | None = None,
    results=None,
    *,
    adapter: Mapping,
    **more,
):
    """The card of a PEFT adapter for a patched model; ``adapter`` is its adapter_config.json as a dict.

    The other arguments, the return value and the errors are those of ``render_model_card``.
    """
    if not isinstance(adapter, Mapping) or not isinstance(adapter.get("peft_type"), str):
        raise refuse(
            "adapter", adapter, "the adapter_config.json of a PEFT adapter, with 'peft_type'"
        )
    for name in ("target_modules", "modules_to_save"):
        value = adapter.get(name) or []
        if not isinstance(value, str) and not (
            isinstance(value, Collection) and all(isinstance(module, str) for module in value)
        ):
            raise refuse(f"adapter[{name!r}]", value, "names of modules, or None")
    more = {"adapter": adapter, "base_model_relation": "adapter", **more}
    facts = Facts(config, base_model=base_model, license=license, results=results or (), **more)
    tags = [flat(adapter["peft_type"]).lower()]
    if base_model:
        tags.append(f"base_model:adapter:{base_model}")
    return _render("adapter.md.jinja", facts, card_data(facts, "peft", tags))


def render_config_card(config: Mapping, license: str | None = None, **more):
    """The card of a repository that holds a ``HyperAttnConfig`` and no weights; see ``render_model_card``."""
    facts = Facts(config, license=license, **more)
    return _render("config.md.jinja", facts, card_data(facts, PROJECT_TAG, []))
