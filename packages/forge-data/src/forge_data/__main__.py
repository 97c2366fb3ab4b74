"""`python -m forge_data`, the same as `forge-data`."""

import sys

from forge_data.cli import main

sys.exit(main())
