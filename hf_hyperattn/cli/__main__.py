"""`python -m hf_hyperattn.cli`, the same as `hyperattn`."""

import sys

from .main import main

sys.exit(main())
