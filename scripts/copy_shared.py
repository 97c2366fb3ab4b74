"""Copy the masters of scripts/shared into the packages that use them: one text per topic.

    python scripts/copy_shared.py            # write the copies
    python scripts/copy_shared.py --check    # exit code 1 if a copy differs from its master, or belongs to no topic

A package uses a topic if it has the file `_shared/TOPIC.py`; to begin, create an empty one. A copy starts with a line that
names its master, and is not edited. A topic imports the standard library, torch, numpy and other topics alone, these by
`from .TOPIC import ...`. Its tests are in tests/shared.

Seen to fail: a line added to a copy, a master removed, a master that no package uses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_HEAD = "# Copied from scripts/shared/{name}; edit that file, then run scripts/copy_shared.py.\n"


def copies() -> list[Path]:
    """Files below `_shared` folders, without their __init__."""
    folders = [*ROOT.glob("packages/*/src/*/_shared"), *ROOT.glob("apps/*/src/*/_shared")]
    return sorted(f for folder in folders for f in folder.glob("*.py") if f.name != "__init__.py")


def wanted(copy: Path) -> str | None:
    """The text that a copy must have; None if it has no master."""
    master = ROOT / "scripts/shared" / copy.name
    if not master.is_file():
        return None
    return _HEAD.format(name=copy.name) + master.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    wrong = []
    for copy in copies():
        text = wanted(copy)
        if text is None:
            wrong.append(
                f"{copy.relative_to(ROOT)} has no master in scripts/shared; add one, or remove it"
            )
        elif text != copy.read_text():
            if args.check:
                wrong.append(
                    f"{copy.relative_to(ROOT)} differs from its master; run scripts/copy_shared.py"
                )
            else:
                copy.write_text(text)
    masters = {f.name for f in (ROOT / "scripts/shared").glob("*.py")}
    wrong += [
        f"scripts/shared/{name} is used by no package"
        for name in sorted(masters - {c.name for c in copies()})
    ]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
