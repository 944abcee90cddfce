"""One of two processes that take roads together: python -m tests.roads.rank RANK FOLDER (see processes.py)."""

import os
import sys
from pathlib import Path

from tests.roads.processes import main

if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(
        0
    )  # all is written; at the interpreter's end threads of the process group may still run, and abort it
