"""Find the tests that execute a line: calls of `hit` planted into a copy of the sources.

A run with a tracer takes several times as long, and a tracer must be started in every rank and child process. A call
that is planted where it is needed costs a microsecond, and a process that imports the copy reports by itself. There is
one at the beginning of every function, named `file::function`, and one before the statement of every planted mistake.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: The module that the planted calls are from; written into the copy of the harness, which is on every path.
MODULE = "forge_mutation_hits"
_SOURCE = '''"""Note which test executes a planted call: a line in FORGE_HITS for each first time in a process."""

import os

_noted = set()
_open, _write, _close = os.open, os.write, os.close  # tests of faults replace these


def hit(name):
    test, folder = os.environ.get("PYTEST_CURRENT_TEST"), os.environ.get("FORGE_HITS")
    if test is None or folder is None or (name, test) in _noted:
        return
    try:
        file = _open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            _write(file, f"{name}\\t{test}\\n".encode())
        finally:
            _close(file)
    except OSError:  # a disk that a test made full; the next call tries again
        return
    _noted.add((name, test))


hit._dynamo_marked_constant = True  # Dynamo calls it while it traces, and leaves it out of the graph
'''


class Site(NamedTuple):
    """A place in a file by its name; `offset` of the first character that a mistake changes."""

    name: str
    offset: int


def first_difference(text: str, right: str, wrong: str) -> int:
    """Offset in `text` of the first character of `right` that `wrong` changes."""
    begin = text.index(right)
    same = 0
    while same < min(len(right), len(wrong)) and right[same] == wrong[same]:
        same += 1
    return begin + min(same, len(right) - 1)


def plant(path: Path, file: str, sites: list[Site]) -> set[str]:
    """Rewrite `path` with calls of `hit`; the names of sites that run when the file is imported.

    file: its name in reports. Those sites are executed, so to speak, by every function of the file.
    """
    text = path.read_text()
    tree = ast.parse(text)
    at_import = {site.name for site in sites if not _before(tree, text, site)}
    for function, qualified in list(_functions(tree)):
        _insert(function.body, 1 if ast.get_docstring(function) else 0, f"{file}::{qualified}")
    begin = 1 if ast.get_docstring(tree) else 0
    while isinstance(found := tree.body[begin] if begin < len(tree.body) else None, ast.ImportFrom):
        if found.module != "__future__":
            break
        begin += 1
    tree.body[begin:begin] = ast.parse(f"from {MODULE} import hit as _forge_hit").body
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
    return at_import


def write_module(harness: Path) -> None:
    (harness / f"{MODULE}.py").write_text(_SOURCE)


def _call(name: str) -> ast.stmt:
    return ast.parse(f"_forge_hit({name!r})").body[0]


def _insert(body: list[ast.stmt], index: int, name: str) -> None:
    body.insert(index, _call(name))


def _functions(
    node: ast.AST, above: str = ""
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        name = getattr(child, "name", "")
        inside = f"{above}.{name}" if above and name else name or above
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, inside
        yield from _functions(child, inside if isinstance(name, str) else above)


def _before(tree: ast.Module, text: str, site: Site) -> bool:
    """Plant the call before the innermost statement at the site; False if it runs at import."""
    lines = text[: site.offset].split("\n")
    at = (len(lines), len(lines[-1].encode()))
    block: list[ast.stmt] | None = None
    index, node, in_function = 0, tree, False
    while True:
        for body, i, child in _statements(node):
            if _first(child) <= at < (child.end_lineno or 0, child.end_col_offset or 0):
                inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                in_function = in_function or inner
                if isinstance(node, ast.ClassDef):
                    in_function = False
                block, index, node = body, i, child
                break
        else:
            break
    if block is None or not in_function:
        return False
    _insert(block, index, site.name)
    return True


def _first(node: ast.stmt) -> tuple[int, int]:
    decorators = getattr(node, "decorator_list", [])
    first = min([node, *decorators], key=lambda n: (n.lineno, n.col_offset))
    return first.lineno, first.col_offset


def _statements(node: ast.AST) -> Iterator[tuple[list[ast.stmt], int, ast.stmt]]:
    """Statements directly inside a node, with the list that holds each."""
    for name in ("body", "orelse", "finalbody"):
        found = getattr(node, name, None)
        if isinstance(found, list):
            yield from ((found, i, child) for i, child in enumerate(found))
    for name in ("handlers", "cases"):
        for part in getattr(node, name, []):
            yield from _statements(part)
