"""``python -m forge_moe.lab``."""

import sys

from forge_moe.lab.table import main

if (
    __name__ == "__main__"
):  # apart from the table: spawned ranks must be able to import their function
    sys.exit(main())
