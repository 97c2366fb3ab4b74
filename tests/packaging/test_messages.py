"""A rule is said in one place: no two rejections or messages of the sources are the same sentence."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
#: Characters from which on a text is a sentence of its own, without what is filled in.
LONG = 40
#: What leaves, which may not import each other, both must say, and why each is asked alone.
LEAVES = {
    "must have the shape of logits {} without the last dim": "forge_parallel's loss of split vocabularies stands without forge_core",  # prose: a row names a rule
}


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each long message, `{}` for what is filled in: every f-string, as sources use them for
    little else, and plain strings in what is raised and in problems."""
    tree = ast.parse(source)
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    plain = {node: None for said in ast.walk(tree) if _says(said) for node in ast.walk(said)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            said = [str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values]
            yield from _long(node.lineno, "".join(said).split("\0"))
    for node in plain:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield from _long(node.lineno, re.split(r"\{[^}]*\}", node.value))


def _says(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) or (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Problem", "invalid")
    )


def _long(line: int, parts: list[str]) -> Iterator[tuple[int, str]]:
    if sum(map(len, parts)) > LONG:
        yield line, "{}".join(parts)


@pytest.mark.slow
def test_no_message_has_a_sentence_of_another() -> None:
    places = defaultdict[str, set[str]](set)
    folders = ("packages/*/src/**/*.py", "apps/*/src/**/*.py", "scripts/shared/*.py")
    for path in sorted(path for folder in folders for path in ROOT.glob(folder)):
        if "_shared" in path.parts:
            continue  # a copy of a master
        for line, text in sentences(path.read_text()):
            places[text].add(f"{path.relative_to(ROOT)}:{line}")
    doubles = {text: sorted(where) for text, where in places.items() if len(where) > 1}
    assert doubles.keys() >= LEAVES.keys(), "a row of LEAVES is said once now; remove it"
    for text in LEAVES:
        packages = [place.split("/")[1] for place in doubles.pop(text)]
        assert len(packages) == len(set(packages)), f"{text} is said twice inside one package"
    assert not doubles, "\n".join(f"{text}\n  {' '.join(where)}" for text, where in doubles.items())


def test_a_sentence_is_found_in_each_way_it_is_written() -> None:
    source = """
raise ValueError("some long text that is raised without any problem")
found.append(f"some long text that is filled {a} and " f"goes on in a second part {b!r}")
yield Problem("key", "unknown", a, "names something that nobody has built or registered", "use b")
error = invalid("key", "range", a, f"lies {b} below the smallest of all that are allowed", "use b")
raise invalid("key", "unknown", a, "names nothing that was ever built or registered", "use b")
note = "a plain text that is neither raised nor a problem, however long it may be"
short = f"{a} of {b} is short"
"""
    assert sorted(sentences(source)) == [
        (2, "some long text that is raised without any problem"),
        (3, "some long text that is filled {} and goes on in a second part {}"),
        (4, "names something that nobody has built or registered"),
        (5, "lies {} below the smallest of all that are allowed"),
        (6, "names nothing that was ever built or registered"),
    ]
