"""`python -m forge_data` is `forge-data`."""

import sys

from forge_data.cli import main

sys.exit(main())
