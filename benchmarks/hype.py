"""HyPE against SDPA without a bias: `run.py` on it alone, with all ways to compute it.

"hype columns" carries the bias in Q and K; the engines evaluate it in tiles; "dense mask" is the stored bias given to
SDPA as its mask, with L x L memory.

python benchmarks/hype.py --lengths 1024 8192 --causal yes
"""

import sys

from run import main

if __name__ == "__main__":
    sys.exit(main(["--operations", "hype", "hype columns", *sys.argv[1:]]))
