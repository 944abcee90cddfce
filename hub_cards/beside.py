"""Writing a card beside the weights without ever losing a person's own README.md."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from .directory import card_for_directory, hub_id_or_none
from .facts import SLUG
from .generated import is_ours_untouched, is_stub, sign
from .results import eval_entries, read_results

CARD = "README.md"
LARGEST = 200_000  #: bytes; no card that a program makes comes near it
RESULTS = Path(".eval_results") / "hf_hyperattn.yaml"


def read_made(path: Path):
    """The card in ``path`` if a program made it and nobody edited it, else None.

    A header with YAML aliases, which can stand for more than any memory holds, was not made by a program we know.
    """
    import yaml
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        if not path.is_file() or path.stat().st_size > LARGEST or not path.read_bytes().lstrip().startswith(b"---"):
            return None
        header = REGEX_YAML_BLOCK.search(path.read_text(encoding="utf-8"))
        if header and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(header[2])):
            return None
        card = ModelCard.load(path, ignore_metadata_errors=True)
    except (ValueError, TypeError, OSError, RecursionError, yaml.YAMLError):
        return None
    return card if is_ours_untouched(card) or is_stub(card) else None


def write_card(directory, *, config: Mapping | None = None, **facts) -> Path | None:
    """Write README.md into a saved directory, unless a person's own README.md is there.

    A README.md that was rendered here and not edited since, or that is the placeholder of Transformers or
    PEFT, is replaced; what somebody added to its header stays. Any other README.md is left as it is, byte for
    byte. Results with ``dataset_id`` and ``task_id`` also go into ``.eval_results/hf_hyperattn.yaml``.

    Args, raises: those of ``card_for_directory``; OSError where the directory cannot be written.

    Returns:
        The path of the card, or None where a person's own README.md was kept.
    """
    directory = Path(directory)
    path = directory / CARD
    old = read_made(path) if os.path.lexists(path) else None
    if old is None and os.path.lexists(path):
        return None
    if old is not None and not is_ours_untouched(old):
        facts = {**header_facts(old), **{name: value for name, value in facts.items() if value is not None}}
    card = card_for_directory(directory, config=config, **facts)
    if old is not None:
        carry_over(card, old)
    write_results(directory, facts.get("results"))
    replace_file(path, str(card).encode())
    return path


def header_facts(placeholder) -> dict:
    """Base model and licence of a placeholder's header, where they are valid: a card's body repeats them."""
    base, licence = hub_id_or_none(placeholder.data.base_model), placeholder.data.license
    found = {"base_model": base} if base else {}
    return found | ({"license": licence} if isinstance(licence, str) and SLUG.fullmatch(licence) else {})


def carry_over(card, old) -> None:
    """Keep the old card's tags, and a placeholder card's header entries; our own entries win."""
    tags = [tag for tag in old.data.tags or [] if not tag.startswith("base_model:")]
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
    if is_ours_untouched(old):
        return
    for key, value in old.data.to_dict().items():
        if key not in ("tags", "library_name", "base_model") and card.data.get(key) is None:
            card.data[key] = value
    sign(card)


def write_results(directory: Path, results) -> None:
    """Write ``.eval_results/hf_hyperattn.yaml`` for the results that belong to a benchmark on the Hub."""
    entries = eval_entries(read_results(results))
    if not entries:
        return
    import yaml
    from huggingface_hub import eval_result_entries_to_yaml

    (directory / RESULTS).parent.mkdir(exist_ok=True)
    replace_file(directory / RESULTS, yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that an interruption leaves either the old one or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)  # never written through: it may be a link that somebody else put there
    try:
        with open(draft, "xb") as file:
            file.write(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def own_card_kept(directory):
    """Around a save: a person's own README.md in ``directory`` is the same afterwards.

    Transformers' ``save_pretrained(directory, push_to_hub=True)`` overwrites README.md with the repository's
    card or a placeholder.
    """
    path = Path(directory) / CARD
    own = path.read_bytes() if path.is_file() and read_made(path) is None else None
    try:
        yield
    finally:
        if own is not None and path.read_bytes() != own:
            replace_file(path, own)
