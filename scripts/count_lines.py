"""Lines of code of each package; exit code 1 if one grew beyond its record in scripts/records.toml.

    python scripts/count_lines.py            # compare
    python scripts/count_lines.py --record   # lower the records of what shrank

Blank lines, comments and docstrings are not counted: an explanation costs nothing. `_shared/` folders are copies of the
masters in scripts/shared, which have a row. `_renamed.py` holds the old names of a package for one version, and is not
counted. Lines cannot hide in the test harness, in templates or in the scripts here:
they have rows, too.

Seen to fail: 300 lines added to a package, a record raised without a reason.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path

import records

ROOT = Path(__file__).resolve().parent.parent
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_TEMPLATES = (".jinja", ".html", ".css", ".js", ".sh", ".sbatch", ".toml", ".txt")


def lines_of_code(text: str) -> int:
    """Lines of Python that hold a token of a statement, without docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def lines_of_text(text: str) -> int:
    """Lines of a template that are not blank."""
    return sum(bool(line.strip()) for line in text.splitlines())


def python_files(folder: Path) -> list[Path]:
    """Python files below `folder`, without copies of shared topics and tables of old names."""
    found = sorted(folder.rglob("*.py"))
    return [f for f in found if "_shared" not in f.parts and f.name != "_renamed.py"]


def public_names(package: Path) -> int:
    """Length of `__all__` in the package's __init__."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def packages() -> list[Path]:
    folders = [*ROOT.glob("packages/*/src/*"), *ROOT.glob("apps/*/src/*")]
    return sorted(f for f in folders if (f / "__init__.py").exists())


def count() -> dict[str, int]:
    """Lines by row: packages, shared masters, the test harness, templates."""
    found = {p.name: _sum(python_files(p), lines_of_code) for p in packages()}
    found["shared"] = _sum(python_files(ROOT / "scripts/shared"), lines_of_code)
    found["harness"] = _sum(python_files(ROOT / "tests/harness/src"), lines_of_code)
    sources = [f for p in packages() for f in sorted(p.rglob("*"))]
    found["templates"] = _sum((f for f in sources if f.suffix in _TEMPLATES), lines_of_text)
    return found


def _sum(files: Iterable[Path], counted: Callable[[str], int]) -> int:
    return sum(counted(f.read_text()) for f in files)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="lower the records of what shrank")
    args = parser.parse_args()
    found = count()
    if args.record:
        records.record("lines", found)
    entries = records.load().get("lines", {})
    folders = {p.name: p for p in packages()}
    print(f"{'':18}{'lines':>7}{'record':>8}{'names':>7}  largest file")
    for row, lines in found.items():
        more = ""
        if row in folders:
            sizes = {f: lines_of_code(f.read_text()) for f in python_files(folders[row])}
            largest = max(sizes, key=lambda f: sizes[f])
            more = f"{public_names(folders[row]):7}  {largest.relative_to(folders[row])} {sizes[largest]}"
        print(f"{row:18}{lines:7}{records.limit(entries.get(row, 0)):8g}{more}")
    print(f"{'packages':18}{sum(found[name] for name in [*folders, 'shared']):7}")
    wrong = records.problems("lines", found)
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
