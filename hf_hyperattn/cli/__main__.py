"""`python -m hf_hyperattn.cli`, the same as `hyperattn`."""

import sys

from .command import main

sys.exit(main())
