"""Where a card joins a push: the one method through which Transformers and PEFT upload what they saved.

``push_to_hub`` and ``save_pretrained(push_to_hub=True)`` both write the files, then a placeholder README.md
(or the one that the repository has), and then call ``PushToHubMixin._upload_modified_files``. A README.md
written by ``save_pretrained`` itself would be overwritten in between, so the card is written there, at the
last moment.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from importlib import metadata

from .beside import own_card_kept, write_card
from .directory import hub_id_or_none

PACKAGES = ("hf-hyperattn", "transformers", "torch", "peft")


def installed() -> dict[str, str]:
    """Versions of the packages that wrote what is published, as far as they are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def gate_range(model) -> tuple[float, float] | None:
    """Smallest and largest blend gate of a patched model; None where there is none, or an offloaded one."""
    gates = [
        parameter.detach()
        for name, parameter in model.named_parameters()
        if name.endswith("gate") and "hyper" in name.split(".") and "original_module" not in name
    ]
    if not gates or any(gate.device.type == "meta" for gate in gates):
        return None
    return min(gate.min().item() for gate in gates), max(gate.max().item() for gate in gates)


def patched_facts(published: object) -> dict | None:
    """Facts for the card of a patched model, a PEFT model around one or a ``HyperAttnConfig``; else None."""
    if hasattr(published, "mechanisms") and hasattr(published, "to_dict"):
        return {"config": published.to_dict(), "versions": installed()}
    config = getattr(published, "config", None)
    spec = config.get("hyperattn") if isinstance(config, Mapping) else getattr(config, "hyperattn", None)
    if not isinstance(spec, Mapping):
        return None
    adapters = getattr(published, "peft_config", None) or {}
    names = [getattr(adapter, "base_model_name_or_path", None) for adapter in adapters.values()]
    names.append(getattr(config, "_name_or_path", None))
    base = next((name for name in names if hub_id_or_none(name)), None)
    return {"config": spec, "base_model": base, "versions": installed(), "gates": gate_range(published)}


def hook_uploads(mixin: type, facts_for: Callable[[object], dict | None] = patched_facts) -> None:
    """Let what is pushed through ``mixin`` carry a card; the same class twice is hooked once.

    Args:
        mixin: ``transformers.utils.hub.PushToHubMixin``, which Transformers' and PEFT's models inherit from.
        facts_for: gets the object that is pushed; gives arguments for ``write_card`` or None for "not ours".
    """
    original = mixin._upload_modified_files
    if hasattr(original, "without_card"):
        return

    @functools.wraps(original)
    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        facts = facts_for(self)
        if facts is not None:
            facts = {"repo_id": repo_id, **facts}
            if facts.get("base_model") == repo_id:
                facts["base_model"] = None
            write_card(working_dir, **facts)
        return original(self, working_dir, repo_id, *args, **kwargs)

    _upload_modified_files.without_card = original
    mixin._upload_modified_files = _upload_modified_files


@contextlib.contextmanager
def card_beside(directory, published: object, pushed: bool = False, facts_for: Callable = patched_facts):
    """Around ``save_pretrained(directory)``: afterwards the card lies beside the weights.

    Args:
        directory: where ``published`` is saved; a person's own README.md in it stays as it is.
        published: what is saved; nothing is written for what ``facts_for`` does not know.
        pushed: whether the save also pushes, which writes the card through ``hook_uploads``.
    """
    facts = facts_for(published)
    if facts is None:
        yield
        return
    with own_card_kept(directory):
        yield
    if not pushed:
        write_card(directory, **facts)


def unhook_uploads(mixin: type) -> None:
    """Take the hook of ``hook_uploads`` off again."""
    mixin._upload_modified_files = getattr(
        mixin._upload_modified_files, "without_card", mixin._upload_modified_files
    )
