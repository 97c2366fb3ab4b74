"""Fail for a file that lists tests by name: marks decide lanes, and a list of names goes stale unseen.

Results of runs under docs/ name tests as they name numbers; they choose nothing.

Seen to fail: a text file with the names of seven tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_NODE = re.compile(r"test_\w+\.py::test_\w+")
_MOST = 5  # an example or two in a text are no list


def main() -> int:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = []
    for name in names.stdout.splitlines():
        path = ROOT / name
        if name.startswith("docs/") or not path.is_file():
            continue
        number = len(set(_NODE.findall(path.read_text(errors="replace"))))
        if number > _MOST:
            found.append(f"{name} names {number} tests; use marks, see docs/testing.md")
    print("\n".join(found) or "no list of tests")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
