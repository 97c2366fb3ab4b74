"""``python -m forge_ckpt``, the same as ``forge-ckpt``."""

import sys

from forge_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
