"""Rejections of the sources, and which of them no test asserts.

    FORGE_REJECTIONS=/tmp/asserted pytest -n 2 packages/forge-moe/tests
    python -m tests.mutations.rejections /tmp/asserted packages/forge-moe

A rejection is a call of `Problem` or `invalid`, or a call with `code="..."`. `rejects` of the test harness records what it
asserted.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Rejection(NamedTuple):
    """A call that makes a problem. `key` and `code` are the nodes of its literals; None where a variable gives them."""

    file: Path
    line: int
    key: ast.Constant | None
    code: ast.Constant | None

    @property
    def package(self) -> str:
        """The name under which Python imports it."""
        return self.file.parts[self.file.parts.index("src") + 1]


def rejections(folder: Path) -> list[Rejection]:
    """Of the sources below a package, in the order of files and lines."""
    files = sorted(f for f in folder.rglob("src/**/*.py") if "_shared" not in f.parts)
    return [found for file in files for found in _of_file(file)]


def _of_file(file: Path) -> Iterator[Rejection]:
    calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
    for call in sorted(calls, key=lambda n: (n.lineno, n.col_offset)):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        given = {k.arg: k.value for k in call.keywords}
        if name in ("Problem", "invalid"):
            given |= dict(zip(("key", "code"), call.args[:2], strict=False))
        elif not isinstance(given.get("code"), ast.Constant):
            continue
        if "code" in given:
            yield Rejection(file, call.lineno, _text(given.get("key")), _text(given["code"]))


def _text(node: ast.expr | None) -> ast.Constant | None:
    return node if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def is_asserted(rejection: Rejection, asserted: set[tuple[str, str, str]]) -> bool:
    """Whether a test asserted this key and code; a key that a variable gives is any key."""
    return any(
        package == rejection.package
        and (rejection.code is None or rejection.code.value == code)
        and (rejection.key is None or f".{key}".endswith(f".{rejection.key.value}"))
        for package, key, code in asserted
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("asserted", type=Path, help="what FORGE_REJECTIONS named")
    parser.add_argument("folders", type=Path, nargs="*", help="packages; all without any")
    args = parser.parse_args()
    asserted = {tuple(json.loads(line)) for line in args.asserted.read_text().splitlines()}
    folders = args.folders or [*sorted(ROOT.glob("packages/*")), ROOT / "apps/train"]
    missed, count = 0, 0
    for rejection in (r for folder in folders for r in rejections(folder)):
        count += 1
        if not is_asserted(rejection, asserted):
            missed += 1
            key, code = (node.value if node else "..." for node in (rejection.key, rejection.code))
            print(f"{rejection.file}:{rejection.line}: {key} {code}")
    print(f"{missed} of {count} rejections are asserted by no test")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
