"""Hyperbolic-distance attention against SDPA: `run.py` on it alone, with all ways to compute it.

python benchmarks/hyperbolic.py --lengths 1024 8192
"""

import sys

from run import main

if __name__ == "__main__":
    operations = ["geodesic", "geodesic+einstein", "squared_lorentz", "squared_lorentz+einstein"]
    sys.exit(main(["--operations", *operations, *sys.argv[1:]]))
