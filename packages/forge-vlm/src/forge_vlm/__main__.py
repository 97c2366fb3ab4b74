"""`python -m forge_vlm`, the same as `forge-vlm`."""

import sys

from forge_vlm.data.command import main

sys.exit(main())
