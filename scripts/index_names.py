"""Names of our distributions on the index: python scripts/index_names.py [DIST ...]; exit code 1 if one is another project's.

A name is free if the index has no version of it, and ours if the changelog has each of its versions. pip asks for
our names only. Without an index nothing is compared, and the exit code is 0.

Seen to fail: a name whose index has a version that its changelog lacks.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Versions in changelogs that were not uploaded.
_NOT_UPLOADED = {"0.0.1", "0.1.0"}


def versions_on_the_index(name: str) -> set[str]:
    """Versions of a distribution on the index of pip; empty without such a name, or without an index."""
    pip = [sys.executable, "-m", "pip", "index", "versions", "--pre", "--retries", "0", name]
    done = subprocess.run(pip, capture_output=True, text=True)
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    return set(found[1].split(", ")) if found else set()


def uploaded_versions() -> dict[str, set[str]]:
    """Versions in the changelog of each distribution."""
    found = {}
    for folder in sorted([*ROOT.glob("packages/*"), *ROOT.glob("apps/*")]):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        text = (folder / "CHANGELOG.md").read_text()
        versions = set(re.findall(r"^## \[([\d.]+)\]", text, re.MULTILINE))
        found[project["name"]] = versions - _NOT_UPLOADED
    return found


def main(names: list[str]) -> int:
    ours = uploaded_versions()
    if unknown := set(names) - ours.keys():
        print(f"{', '.join(unknown)}: not a distribution of this repository; use {', '.join(ours)}")
        return 1
    if not versions_on_the_index("hatchling"):  # what builds the wheels
        print("index: not compared, since pip reaches none")
        return 0

    wrong = 0
    for name in names or ours:
        found = versions_on_the_index(name)
        others = ", ".join(sorted(found - ours[name]))
        wrong += bool(others)
        state = f"another project's, {others}" if others else "ours" if found else "free"
        print(f"index: {name} is {state}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
