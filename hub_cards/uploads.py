"""Where a card joins a push: the one method through which Transformers and PEFT upload what they saved.

``push_to_hub`` and ``save_pretrained(push_to_hub=True)`` both write the files, then a placeholder README.md (or
the one that the repository has), and then call ``PushToHubMixin._upload_modified_files``. A README.md written
by ``save_pretrained`` itself would be overwritten in between, so the card is written there, at the last moment.
"""

import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .beside import CARD, own_card_kept, read_made, try_to_write_card, warn_of_kept
from .errors import explained
from .published import patched_facts

HOOKED = "_hub_cards_original"
logger = logging.getLogger("hf_hyperattn")


def hook_uploads(mixin: type, facts_for: Callable[[object], dict | None] = patched_facts) -> None:
    """Let what is pushed through ``mixin`` carry a card, and a failed push its cause; once only for each class.

    Args:
        mixin: ``transformers.utils.hub.PushToHubMixin``, which Transformers' and PEFT's models inherit from.
        facts_for: gets the object that is pushed; gives arguments for ``write_card`` or None for "not ours".
    """
    for name, wrapper in (("_upload_modified_files", _with_card), ("push_to_hub", _with_cause)):
        original = getattr(mixin, name)
        if not hasattr(original, HOOKED):
            setattr(mixin, name, _bound(wrapper, original, facts_for))


def _bound(wrapper: Callable, original: Callable, facts_for: Callable) -> Callable:
    """``wrapper`` as a method that takes the place of ``original`` and remembers it."""

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        return wrapper(self, original, facts_for, *args, **kwargs)

    setattr(method, HOOKED, original)
    return method


def _with_card(self, original, facts_for, working_dir, repo_id, *args, **kwargs):
    """Write the card into what is about to be uploaded."""
    facts = read_facts(self, facts_for)
    if facts is not None:
        facts = {"repo_id": repo_id, **facts}
        if facts.get("base_model") == repo_id:
            facts["base_model"] = None
        try_to_write_card(working_dir, **facts)
    return original(self, working_dir, repo_id, *args, **kwargs)


def _with_cause(self, original, facts_for, repo_id, *args, **kwargs):
    """Add a line with the cause to the error of a failed push."""
    with (
        contextlib.nullcontext()
        if read_facts(self, facts_for) is None
        else explained(f"push to {repo_id}")
    ):
        return original(self, repo_id, *args, **kwargs)


@contextlib.contextmanager
def card_beside(
    directory,
    published: object,
    pushed: bool = False,
    facts_for: Callable = patched_facts,
    replaces=None,
):
    """Around ``save_pretrained(directory)``: afterwards the card lies beside the weights.

    Args:
        directory: where ``published`` is saved; a person's own README.md in it stays as it is.
        published: what is saved; nothing is written for what ``facts_for`` does not know.
        pushed: whether the save also pushes, which writes the card through ``hook_uploads``.
        replaces: where the files go from ``directory``, when that is a folder in between. A card that a program
            made there is carried on; over a person's own README.md none is written.

    A card never stops a save: one that cannot be read or made is a warning.
    """
    facts = read_facts(published, facts_for)
    if facts is None:
        yield
        return
    if replaces is None:
        with own_card_kept(directory), explained(f"save to {directory}"):
            yield
        if not pushed:
            try_to_write_card(directory, **facts)
        return
    old, new = Path(replaces) / CARD, Path(directory) / CARD
    own = os.path.lexists(old) and not copy_made(old, new)
    yield
    if own:
        new.unlink(missing_ok=True)
        warn_of_kept(old)
        return
    try_to_write_card(directory, shown=replaces, **facts)


def read_facts(published: object, facts_for: Callable) -> dict | None:
    """What the card says of what is saved; None for what is not ours, and with a warning where that cannot be told."""
    try:
        return facts_for(published)
    except Exception as error:  # the save goes on without a card
        logger.warning(
            "hf_hyperattn: no card is written: %s",
            " ".join(str(error).split()) or type(error).__name__,
        )
        return None


def copy_made(old: Path, new: Path) -> bool:
    """Copy a README.md that a program made; False, and no copy, for a person's own and for one that cannot be read."""
    if read_made(old) is None:
        return False
    try:
        shutil.copy2(old, new)
    except OSError:
        return False
    return True


def unhook_uploads(mixin: type) -> None:
    """Take what ``hook_uploads`` did off again."""
    for name in ("_upload_modified_files", "push_to_hub"):
        setattr(mixin, name, getattr(getattr(mixin, name), HOOKED, getattr(mixin, name)))
