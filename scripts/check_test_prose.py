"""Tests assert values, not prose: rewording a message changes no test.

    python scripts/check_test_prose.py            # exit code 1 if an area has more hits than scripts/records.toml allows
    python scripts/check_test_prose.py --show AREA
    python scripts/check_test_prose.py --record   # lower the records

Two kinds of hits, by area (tests of a package or of the runner; a folder of tests/):

- raises: `pytest.raises` of a built-in exception without `match`, or with a pattern of plain words alone. A pattern names
  the argument or the value: it holds a name with `_` or `.`, a number, something in quotes or brackets, an argument of a
  function of the sources, or what an expression computes. `rejects` of the test harness asserts key, value and code.
- sentences: a literal of a test of which at least half of the words are runs of three or more that also stand in a string
  of the sources (docstrings aside).

A line with `# prose: REASON` is exempt, and counted.

The name of a test states its claim in plain words: none has a word of `never` or `test_names` of scripts/language.toml.

Seen to fail: a `pytest.raises(ValueError)` without pattern, an assertion of three words of a message, a test that `is_refused`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import records
from check_language import LISTS, whole_word

ROOT = Path(__file__).resolve().parent.parent
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_PLAIN = re.compile(r"[A-Za-z' ,;:\-]*")
_LENGTH = 3  # consecutive words
_EXEMPT = "# prose: "


class Hit(NamedTuple):
    """A line that asserts prose."""

    area: str
    kind: str
    file: Path
    line: int
    text: str


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of the nodes of docstrings, and of other strings that are statements."""
    return {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string; a formatted string is its constant parts, with a break for each value."""
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            parts = [str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values]
            yield node.lineno, "".join(parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:  # fmt: skip
            yield node.lineno, node.value


def runs(text: str) -> list[list[str]]:
    """Consecutive words with nothing but spaces between them."""
    parts = re.split(r"[^A-Za-z' ]+", text)
    return [[word.lower() for word in _WORD.findall(part)] for part in parts]


def phrases(text: str) -> set[tuple[str, ...]]:
    """Runs of three words."""
    windows = ((run, i) for run in runs(text) for i in range(len(run) - _LENGTH + 1))
    return {tuple(run[i : i + _LENGTH]) for run, i in windows}


def is_of_sources(text: str) -> bool:
    """Whether at least half of the words stand in strings of the sources as they do here."""
    found = runs(text)
    covered = {
        (number, i + j)
        for number, run in enumerate(found)
        for i in range(len(run) - _LENGTH + 1)
        if tuple(run[i : i + _LENGTH]) in source_phrases()
        for j in range(_LENGTH)
    }
    return bool(covered) and 2 * len(covered) >= sum(map(len, found))


@functools.cache
def source_files() -> tuple[Path, ...]:
    """The sources of packages and apps."""
    return tuple(sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")]))


@functools.cache
def source_phrases() -> frozenset[tuple[str, ...]]:
    """All runs of three words in strings of the sources."""
    trees = (ast.parse(file.read_text()) for file in source_files())
    return frozenset(p for tree in trees for _, text in literals(tree) for p in phrases(text))


@functools.cache
def argument_names() -> frozenset[str]:
    """Names of arguments and fields in the sources."""
    names: set[str] = set()
    for file in source_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return frozenset(names)


def is_prose(pattern: ast.expr | None) -> bool:
    """Whether the `match` of a `pytest.raises` names neither an argument nor a value."""
    if pattern is None:
        return True
    if not (isinstance(pattern, ast.Constant) and isinstance(pattern.value, str)):
        return False
    text = pattern.value.replace(r"\.", ".").replace(".*", " ").replace("^", "").replace("$", "")
    words = _WORD.findall(text)
    return bool(_PLAIN.fullmatch(text)) and not (set(words) & argument_names())


def is_raises(node: ast.AST) -> bool:
    """Whether a node is `pytest.raises(BuiltIn, ...)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if node.func.attr != "raises" or not node.args:
        return False
    kinds = node.args[0].elts if isinstance(node.args[0], ast.Tuple) else [node.args[0]]
    return any(isinstance(kind, ast.Name) and hasattr(builtins, kind.id) for kind in kinds)


def area_of(file: Path) -> str:
    """The package, `train`, or the folder of tests/."""
    parts = file.relative_to(ROOT).parts
    return parts[1] if parts[0] in ("packages", "apps") else "/".join(parts[:2]).removesuffix(".py")


def hits_of(file: Path) -> Iterator[Hit]:
    """Hits of a test file, without those whose line is exempt."""
    text = file.read_text()
    tree, lines, area = ast.parse(text), text.splitlines(), area_of(file)
    for node in ast.walk(tree):
        if is_raises(node):
            assert isinstance(node, ast.Call)
            given = next((k.value for k in node.keywords if k.arg == "match"), None)
            if is_prose(given) and _EXEMPT not in lines[node.lineno - 1]:
                yield Hit(area, "raises", file, node.lineno, lines[node.lineno - 1].strip())
    for line, literal in literals(tree):
        if is_of_sources(literal) and _EXEMPT not in lines[line - 1]:
            yield Hit(area, "sentences", file, line, " ".join(literal.split())[:100])


def test_files() -> list[Path]:
    """Test files of packages, apps and tests/."""
    folders = [*ROOT.glob("packages/*/tests"), *ROOT.glob("apps/*/tests"), ROOT / "tests"]
    return sorted(f for folder in folders for f in folder.rglob("*.py"))


def wrong_names() -> Iterator[str]:
    """A line for each name of a test that has a word of the lists."""
    lists = tomllib.loads(LISTS.read_text())
    words = {**lists["never"], **lists["test_names"]}
    patterns = {whole_word(expression): plain for expression, plain in words.items()}
    for file in test_files():
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE):
            for pattern, plain in patterns.items():
                if found := pattern.search(name):
                    yield f"{file.relative_to(ROOT)}: {name} has `{found[0]}`; write: {plain}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", metavar="AREA", help="print the hits of an area, or of `all`")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    hits = [hit for file in test_files() for hit in hits_of(file)]
    if args.show:
        for hit in (h for h in hits if args.show in (h.area, "all")):
            print(f"{hit.file.relative_to(ROOT)}:{hit.line}: {hit.kind}: {hit.text}")
        return 0
    exempt = sum(file.read_text().count(_EXEMPT) for file in test_files())
    counts = Counter(f"{hit.kind} in {hit.area}" for hit in hits)
    print(f"lines of tests that assert prose: {len(hits)}; exempt: {exempt}")
    if args.record:
        records.record("prose", counts)
        return 0
    wrong = [*records.problems("prose", counts), *wrong_names()]
    print("\n".join(wrong), file=sys.stderr) if wrong else None
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
