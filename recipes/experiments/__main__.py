"""Run an experiment: `python recipes/experiments NAME`; see `--help`."""

import sys
from pathlib import Path

# Python puts this folder first, as it is what was run; the packages lie beside it.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from experiments.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
