"""Words, and functions without paragraphs: counts that may only fall. Exit code 1 if one rose.

    python scripts/check_language.py             # compare with scripts/records.toml
    python scripts/check_language.py --record    # lower the records
    python scripts/check_language.py --show WORD # its lines: of a word, of `WORD in PACKAGE`, or the functions of `walls`

`never` counts each phrase of that list over sources and pages, `watched` each watched word of a package. A line that ends in
`language: REASON` in a comment is exempt; exempt lines are counted and printed. `walls` is the percentage of the functions
with at least 15 code lines that hold more than 15 of them without a blank line or a comment. Comments per 100 lines of
code are printed only.

Seen to fail: one `oftener`, four `behind`, nine functions of 20 lines without a blank line.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import records

ROOT = Path(__file__).resolve().parent.parent
LISTS = Path(__file__).with_name("language.toml")
_LONG = 15  # lines
_EXEMPT = re.compile(r"language: \w+")


class Line(NamedTuple):
    """A line of a source or a page."""

    file: str
    number: int
    text: str

    @property
    def area(self) -> str:
        """The package of the line, `shared` for masters of shared topics, or `docs`."""
        found = re.match(r"(?:packages|apps)/([\w-]+)/", self.file)
        return found[1] if found else "shared" if self.file.endswith(".py") else "docs"


def whole_word(expression: str) -> re.Pattern[str]:
    """Match `expression` between letters of no word; a blank in it also matches `_` and `-`."""
    spaced = expression.replace(" ", r"[\s_-]")
    return re.compile(rf"(?<![A-Za-z])(?:{spaced})(?![A-Za-z])", re.IGNORECASE)


def lines_of_text(exempt_files: list[str], format_names: list[str]) -> Iterator[Line]:
    """All lines of sources and pages, as git has them, without the names that formats fix."""
    fixed = re.compile("|".join(map(re.escape, format_names)))
    listed = subprocess.run(
        ["git", "ls-files", "packages/*/src/*.py", "apps/*/src/*.py", "scripts/shared/*.py", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for file in listed.splitlines():
        path = ROOT / file
        skipped = {path.name, file} & set(exempt_files) or "_shared" in path.parts
        if skipped or not path.is_file():
            continue
        for number, text in enumerate(path.read_text().splitlines(), 1):
            yield Line(file, number, fixed.sub("", text))


def count_words(lists: dict[str, Any]) -> tuple[Counter[str], Counter[str], int]:
    """(never, by phrase, pages too; watched, by word and package; exempt lines)."""
    never = {name: whole_word(name) for name in lists["never"]}
    watched = {name: whole_word(name) for name in lists["watched"]}
    of_never: Counter[str] = Counter(dict.fromkeys(never, 0))
    of_watched: Counter[str] = Counter()
    exempt = 0
    for line in lines_of_text(lists["exempt_files"], lists["format_names"]):
        if _EXEMPT.search(line.text):
            exempt += 1
            continue
        for name, pattern in never.items():
            of_never[name] += len(pattern.findall(line.text))
        for name, pattern in watched.items() if line.area != "docs" else ():
            of_watched[f"{name} in {line.area}"] += len(pattern.findall(line.text))
    return of_never, of_watched, exempt


# ---- walls


class Shape(NamedTuple):
    """Of the functions of a package. walls: the places of those without paragraphs."""

    long: int
    walls: list[str]
    comments: int
    code: int

    @property
    def percent(self) -> int:
        return round(100 * len(self.walls) / max(self.long, 1))


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> list[str]:
    """The lines of the body without its docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if documented and len(function.body) > 1:
        first = function.body[1]
    return lines[first.lineno - 1 : function.end_lineno]


def longest_stretch(body: list[str]) -> tuple[int, int]:
    """(code lines, most of them in sequence without a blank line or a comment)."""
    count = run = longest = 0
    for line in body:
        gap = not line.strip() or line.strip().startswith("#")
        count += not gap
        run = 0 if gap else run + 1
        longest = max(longest, run)
    return count, longest


def shape_of(package: Path) -> Shape:
    """Count the long functions of a package, those with walls, comments and code."""
    long = comments = code = 0
    walls = []
    for file in package.rglob("*.py"):
        if "_shared" in file.parts:
            continue
        lines = file.read_text().splitlines()
        comments += sum(bool(re.search(r"(^|\s)# ", line)) for line in lines)
        code += sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)

        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count, longest = longest_stretch(body_lines(node, lines))
                long += count >= _LONG
                if count >= _LONG and longest > _LONG:
                    walls.append(
                        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name}, {longest} lines"
                    )
    return Shape(long, walls, comments, code)


def show(what: str, lists: dict[str, Any], shapes: dict[str, Shape]) -> None:
    """Print the lines of a word, in one package if `what` names it, or the functions of `walls`."""
    if what == "walls":
        print("\n".join(wall for shape in shapes.values() for wall in shape.walls))
        return
    word, _, area = what.partition(" in ")
    pattern = whole_word(word)
    for line in lines_of_text(lists["exempt_files"], lists["format_names"]):
        exempt = area and _EXEMPT.search(line.text)
        if pattern.search(line.text) and area in ("", line.area) and not exempt:
            print(f"{line.file}:{line.number}: {line.text.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--record", action="store_true", help="lower the records")
    parser.add_argument("--show", metavar="WORD", help="print the lines of a word, or `walls`")
    args = parser.parse_args()
    lists = tomllib.loads(LISTS.read_text())
    shapes = {
        p.name: shape_of(p)
        for p in sorted([*ROOT.glob("packages/*/src/*"), *ROOT.glob("apps/*/src/*")])
    }
    if args.show:
        show(args.show, lists, shapes)
        return 0

    never, watched, exempt = count_words(lists)
    for name, shape in shapes.items():
        print(
            f"{name:18} walls in {len(shape.walls):3} of {shape.long:3} long functions ({shape.percent} %), "
            f"{100 * shape.comments / shape.code:.1f} comments per 100 lines"
        )
    print(f"never: {sum(never.values())}, watched: {sum(watched.values())}, exempt lines: {exempt}")
    found = {
        "never": never,
        "watched": watched,
        "walls": {name: shape.percent for name, shape in shapes.items()},
    }
    wrong = []
    for section, numbers in found.items():
        if args.record:
            records.record(section, numbers)
        wrong += records.problems(section, numbers)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        print("--show prints the lines: --show 'WORD in PACKAGE', --show walls", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
