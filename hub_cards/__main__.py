"""``python -m hub_cards DIR``: write the card of a saved model or adapter beside its weights."""

import argparse
import json
import sys
from pathlib import Path

from .beside import write_card


def read_facts(path: str | None) -> dict:
    """The facts of a JSON file, or none."""
    facts = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    if not isinstance(facts, dict):
        raise ValueError(f"hub_cards: {path} holds a {type(facts).__name__}; allowed: a JSON object of facts")
    return facts


def main(arguments: list[str] | None = None) -> int:
    """Write DIR/README.md; 0 when written, 1 when a person's own README.md was kept, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m hub_cards", description=__doc__)
    parser.add_argument("directory", help="what save_pretrained wrote")
    parser.add_argument("--facts", help="JSON file with fields of hub_cards.Facts: base_model, license, results, ...")
    chosen = parser.parse_args(arguments)
    try:
        written = write_card(chosen.directory, **read_facts(chosen.facts))
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    print(f"wrote {written}" if written else f"kept {chosen.directory}/README.md: it was written or edited by hand")
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
