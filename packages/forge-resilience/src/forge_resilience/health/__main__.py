"""The command line: print the nodes that the last attempt of a run found broken.

    nodes=$(python -m forge_resilience.health runs/a) || exit 71

They are those that its events name, separated by commas; exit code 1 if there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from forge_resilience._shared.paths import user_path
from forge_resilience.health.check import broken_nodes


def main(arguments: Sequence[str]) -> int:
    """Print the broken nodes of a run's folder, or of a journal; 1 if it names none, 2 for wrong arguments."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    path = user_path(arguments[0])
    nodes = broken_nodes(path / "events.jsonl" if path.is_dir() else path)
    if nodes:
        print(",".join(nodes))
    return 0 if nodes else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
