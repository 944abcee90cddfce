"""Writing a card beside the weights without ever losing a person's own README.md."""

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .directory import card_for_directory, hub_id_or_none
from .facts import SLUG
from .generated import is_ours_untouched, is_stub, sign
from .results import eval_entries, read_results

CARD = "README.md"
LARGEST = 200_000  #: bytes; no card that a program makes comes near it
#: Of a header: characters and levels. PyYAML needs minutes for some thousand levels; a model-index has seven.
LONGEST_HEADER, MOST_LEVELS = 50_000, 20
#: Line breaks in a row that no card has. The expression of huggingface_hub before version 2 takes minutes for them.
EMPTY_LINES = re.compile(r"[\r\n]{200}")
RESULTS = Path(".eval_results") / "hf_hyperattn.yaml"

logger = logging.getLogger("hf_hyperattn")


class UnreadableCard(ValueError):
    """A README.md from which no card can be read; the message says why, as a part of a sentence."""


def read_made(path: Path):
    """Return the card in ``path`` if a program made it and nobody edited it, else None."""
    try:
        return load_made(path)
    except UnreadableCard:
        return None


def load_made(path: Path):
    """Return the card in ``path`` if a program made it and nobody edited it, None if a person wrote or edited it.

    Raises:
        UnreadableCard: it holds no card: no regular file, not UTF-8, a broken or oversized header, ...
    """
    try:
        header, text = split_header(path)
        if header is None:
            return None
        check_header(header)
        card = parse_card(text)
        return card if is_ours_untouched(card) or is_stub(card) else None
    except UnreadableCard:
        raise
    except OSError as error:
        raise UnreadableCard(f"it cannot be read ({error.strerror or error})") from error
    except (
        Exception
    ) as error:  # PyYAML and huggingface_hub raise many kinds, and none may stop a save
        why = " ".join(str(error).split())[:200]
        raise UnreadableCard(
            f"its header cannot be read ({type(error).__name__}: {why})"
        ) from error


def split_header(path: Path) -> tuple[str | None, str]:
    """The YAML header of a Markdown file, None if it has none, and the whole text."""
    if not path.is_file():
        raise UnreadableCard("it is no regular file")
    if path.stat().st_size > LARGEST:
        raise UnreadableCard(f"it has more than {LARGEST:,} bytes")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableCard("it is not UTF-8 text") from error
    if "\0" in text:
        raise UnreadableCard("it is binary")
    return find_header(text), text


def find_header(text: str) -> str | None:
    """The YAML header of a card; None if there is none.

    It is found by the expression with which huggingface_hub will find it again: what is checked must be what is parsed.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if not text.lstrip().startswith("---") or EMPTY_LINES.search(text):
        return None
    found = REGEX_YAML_BLOCK.search(text)
    return found and found[2]


def check_header(header: str) -> None:
    """Raise UnreadableCard for a header that takes minutes to read, or more memory than there is.

    YAML aliases can stand for more than any memory holds. No program we know writes them.
    """
    import yaml

    if len(header) > LONGEST_HEADER:
        raise UnreadableCard(f"its header has more than {LONGEST_HEADER:,} characters")
    level = 0
    for event in yaml.parse(
        header
    ):  # event by event, so that a deep header is refused before it is read
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if level > MOST_LEVELS:
            raise UnreadableCard(f"its header is nested more than {MOST_LEVELS} deep")
        if isinstance(event, yaml.AliasEvent):
            raise UnreadableCard("its header has YAML aliases")


def parse_card(text: str):
    """The text as a ``ModelCard`` whose tags are strings, as all that reads or merges tags expects."""
    from huggingface_hub import ModelCard

    card = ModelCard(text)
    tags: Any = getattr(card.data, "tags", None)
    if tags is not None and not (
        isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
    ):
        raise UnreadableCard("its tags are not a list of strings")
    return card


def warn_of_kept(path: Path, shown: object = None) -> None:
    """Log why the README.md in ``path`` stays as it is, if that is not because a person wrote it.

    Args:
        path: the README.md.
        shown: the path to show. Default: ``path``.
    """
    try:
        load_made(path)
    except UnreadableCard as reason:
        logger.warning(
            "hf_hyperattn: %s was left as it is, and no card is written: %s", shown or path, reason
        )


def write_card(directory, *, config: Mapping | None = None, **facts) -> Path | None:
    """Write README.md into a saved directory, unless a person's own README.md is there.

    A README.md that was rendered here and not edited since, or that is the placeholder of Transformers or
    PEFT, is replaced; what somebody added to its header stays. Any other README.md is left as it is, byte for
    byte; one from which no card can be read (broken YAML, not UTF-8, a folder) is also named in a warning.
    Results with ``dataset_id`` and ``task_id`` also go into ``.eval_results/hf_hyperattn.yaml``.

    Args, raises: those of ``card_for_directory``; OSError where the directory cannot be written.

    Returns:
        The path of the card, or None where a README.md was kept.
    """
    directory = Path(directory)
    path = directory / CARD
    old = None
    if os.path.lexists(path):
        old = read_made(path)
        if old is None:
            warn_of_kept(path)
            return None
    if old is not None and not is_ours_untouched(old):
        facts = {
            **header_facts(old),
            **{name: value for name, value in facts.items() if value is not None},
        }
    card = card_for_directory(directory, config=config, **facts)
    if old is not None:
        try:
            carry_over(card, old)
            parse_card(str(card))
        except Exception as error:  # entries that nothing reads again
            why = " ".join(str(error).split())[:200]
            logger.warning(
                "hf_hyperattn: %s was left as it is, since its header has no place in a card: %s",
                path,
                why,
            )
            return None
    write_results(directory, facts.get("results"))
    replace_file(path, str(card).encode())
    return path


def try_to_write_card(directory, *, shown: object = None, **facts) -> Path | None:
    """Write the card of what was just saved; a card that cannot be made is a warning, since no save may fail by it.

    Args:
        directory: where the weights are.
        shown: the directory that the warning names. Default: ``directory``.
        **facts: as in ``write_card``.
    """
    try:
        return write_card(directory, **facts)
    except Exception as error:  # whatever is wrong with a card, weights are worth more
        why = " ".join(str(error).split()) or type(error).__name__
        logger.warning("hf_hyperattn: no card is written into %s: %s", shown or directory, why)
        return None


def header_facts(placeholder) -> dict:
    """Base model and licence of a placeholder's header, where they are valid: a card's body repeats them."""
    base, licence = hub_id_or_none(placeholder.data.base_model), placeholder.data.license
    found = {"base_model": base} if base else {}
    return found | (
        {"license": licence} if isinstance(licence, str) and SLUG.fullmatch(licence) else {}
    )


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
    replace_file(
        directory / RESULTS,
        yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False).encode(),
    )


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that an interruption leaves either the old one or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(
        missing_ok=True
    )  # never written through: it may be a link that somebody else put there
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
