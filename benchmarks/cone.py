"""Cone attention against SDPA: `run.py` on the cones alone, with all ways to compute them.

python benchmarks/cone.py --lengths 1024 8192
"""

import sys

from run import main

if __name__ == "__main__":
    sys.exit(main(["--operations", "umbral", "penumbral", "blend", *sys.argv[1:]]))
