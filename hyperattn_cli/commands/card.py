"""`hyperattn card`: print or write the card of a saved model, adapter or config.

`hyperattn push` reads the card with `read_card` too.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import hub_cards
from hf_hyperattn.utils.files import read_json


def run(args: argparse.Namespace) -> int:
    """Print or write the card.

    Returns:
        1 if a README.md that a person wrote was kept, else 0.

    Raises:
        ValueError: Bad input.
    """
    folder, facts, text = read_card(args)
    written = hub_cards.write_card(folder, **facts) if args.write else None
    if args.json:
        print(json.dumps({"card": text, "written": written and str(written)}, indent=2))
    # Without --write the card itself is the output.
    elif not args.write:
        print(text)
    elif written:
        print(f"wrote {written}")
    else:
        print(f"kept {folder / 'README.md'}: it was written or edited by hand")
    return 1 if args.write and written is None else 0


def read_card(args: argparse.Namespace) -> tuple[Path, dict[str, Any], str]:
    """Read a saved folder and the file of --facts, and make the card.

    Returns:
        The folder, the facts and the card.

    Raises:
        ValueError: The folder holds nothing that has a card, or a fact is unknown or of a wrong
            type.
    """
    folder = Path(args.model).expanduser()
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "no such folder"
        raise ValueError(
            f"{args.model}: {kind}; allowed: the folder of a saved model, adapter or HyperAttnConfig"
        )
    facts = {} if args.facts is None else read_json(Path(args.facts))
    # Fields without `init` are computed by the card and cannot be given.
    known = {field.name for field in fields(hub_cards.Facts) if field.init}
    strange = next((name for name in facts if name not in known), None)
    if strange is not None:
        raise ValueError(
            f"--facts {args.facts} has the field {strange[:80]!r}; allowed: {', '.join(sorted(known))}"
        )
    try:
        return folder, facts, str(hub_cards.card_for_directory(folder, **facts))
    # The card reads values without checking their types, so a wrong one fails in its formatting.
    except (TypeError, AttributeError) as error:
        source = args.facts or folder
        raise ValueError(
            f"{source} holds a value of another type than a card has there: {error}"
        ) from error
