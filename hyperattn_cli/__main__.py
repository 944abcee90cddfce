"""`python -m hyperattn_cli`, the same as `hyperattn`."""

import sys

from .run import main

sys.exit(main())
