"""`python -m hf_hyperattn.cli`, the same as `hyperattn`."""

import sys

from hyperattn_cli import main

sys.exit(main())
