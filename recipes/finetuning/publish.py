"""The card beside what was saved, with the numbers of the run, and the upload where the recipe asks for it."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi

import hub_cards

from .models import id_on_hub, shown_name
from .settings import Settings


def reserve(settings: Settings) -> None:
    """Make the repository before the work begins, so that a wrong id or token costs none of it."""
    hub = settings.hub
    if not hub.push:
        return
    with in_one_line(f"hub.id={hub.id!r}"):
        HfApi().create_repo(hub.id, private=hub.private, exist_ok=True)


@contextmanager
def in_one_line(action: str):
    """Errors of the Hub as one line that says what to do."""
    try:
        yield
    except Exception as error:
        raise ValueError(hub_cards.explain_hub_error(error, action)) from error


def publish(settings: Settings, folder: Path, results: dict) -> None:
    """Write README.md into the saved folder, and upload the folder where `hub.push` is set."""
    hub = settings.hub
    hub_cards.write_card(
        folder,
        repo_id=hub.id,
        base_model=id_on_hub(settings),
        license=hub.license,
        gates=tuple(results["gates"][n] for n in ("lowest", "highest"))
        if results["gates"]
        else None,
        versions={n: v for n, v in results["versions"].items() if n != "python"},
        results=[measured(settings, results)],
    )
    if not hub.push:
        return
    with in_one_line(f"all is saved in {folder}, but the push to {hub.id}"):
        HfApi().upload_folder(
            repo_id=hub.id, folder_path=folder, commit_message="Trained with hf_hyperattn"
        )
    print(f"published            {hub.id}")


def measured(settings: Settings, results: dict) -> dict:
    """The measured perplexity, or accuracy, as a card states it."""
    machine, versions = results["machine"], results["versions"]
    metric = "perplexity" if "perplexity" in results["after"] else "accuracy"
    what = f"tokens in rows of {settings.data.length}" if metric == "perplexity" else "labels"
    return {
        "metric": metric,
        "task": settings.model.task,
        "value": results["after"][metric],
        "base_value": results["before"][metric],
        "dataset": f"{results['data']['source']}, held-out part",
        "command": results["command"],
        "machine": f"{machine['accelerator'] or machine['architecture']}, {machine['cores']} CPU cores",
        "versions": versions,
        "date": results["date"],
        "notes": f"{results['after']['predicted']} {what}; base is {shown_name(settings.model)} as it was.",
    }
