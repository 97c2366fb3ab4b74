"""The command line: `python -m forge_resilience.health RUN` prints the nodes that its last life found broken."""

from __future__ import annotations

import sys

from forge_resilience.health.exclude import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
