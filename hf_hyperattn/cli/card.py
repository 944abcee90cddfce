"""`hyperattn card`: the card of a saved model, adapter or config, printed or written beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import hub_cards

from ..files import read_json


def run(args: argparse.Namespace) -> int:
    """Print or write the card; 1 where a README.md of a person's own was kept. Raises ValueError for bad input."""
    folder, facts, text = read_card(args)
    written = hub_cards.write_card(folder, **facts) if args.write else None
    if args.json:
        print(json.dumps({"card": text, "written": written and str(written)}, indent=2))
    elif not args.write:
        print(text)
    elif written:
        print(f"wrote {written}")
    else:
        print(f"kept {folder / 'README.md'}: it was written or edited by hand")
    return 1 if args.write and written is None else 0


def read_card(args: argparse.Namespace) -> tuple[Path, dict[str, Any], str]:
    """The folder of something saved, what the file of --facts says of it, and its card; ValueError where it is none."""
    folder = Path(args.model).expanduser()
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "no such folder"
        raise ValueError(f"{args.model}: {kind}; allowed: the folder of a saved model, adapter or HyperAttnConfig")
    facts = {} if args.facts is None else read_json(Path(args.facts))
    try:
        return folder, facts, str(hub_cards.card_for_directory(folder, **facts))
    except TypeError as error:
        raise ValueError(f"--facts {args.facts}: {error}; allowed: the fields of hub_cards.Facts") from error
