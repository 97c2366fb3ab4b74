"""Rejections of the sources: which no test asserts, and mistakes that change one.

    FORGE_REJECTIONS=/tmp/asserted pytest -n 2 packages/forge-moe/tests
    python -m tests.mutations.rejections /tmp/asserted packages/forge-moe      # rejections that no test asserted

    python -m tests.mutations.rejections --swap 30 --seed 1 > swapped.py       # each has to turn a test red
    python -m tests.mutations.rejections --reword 20 --seed 1 > reworded.py    # none may
    hatch run mutations --lane ci --mistakes swapped.py

A rejection is a call of `Problem` or `invalid`, or a call with `code="..."`. `rejects` of the test harness records what it
asserted. `--swap` draws rejections, and gives each the key or the code of the next one in its file. `--reword` draws
rejections and other exceptions, and spells each word of their text backwards.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Rejection(NamedTuple):
    """A call that makes a problem. `key` and `code` are the nodes of its literals; None where a variable gives them."""

    file: Path
    call: ast.Call
    key: ast.Constant | None
    code: ast.Constant | None

    @property
    def package(self) -> str:
        """The name under which Python imports it."""
        return self.file.parts[self.file.parts.index("src") + 1]


def source_files(folder: Path) -> list[Path]:
    """The sources below a package, without copies of shared topics."""
    return sorted(f for f in folder.rglob("src/**/*.py") if "_shared" not in f.parts)


def rejections(file: Path) -> list[Rejection]:
    """Of a file, in the order of lines."""
    calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
    return [
        found
        for call in sorted(calls, key=lambda n: (n.lineno, n.col_offset))
        for found in _of_call(file, call)
    ]


def _of_call(file: Path, call: ast.Call) -> Iterator[Rejection]:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    given = {k.arg: k.value for k in call.keywords}
    if name in ("Problem", "invalid"):
        given |= dict(zip(("key", "code"), call.args[:2], strict=False))
    elif _text(given.get("code")) is None:
        return
    if "code" in given:
        yield Rejection(file, call, _text(given.get("key")), _text(given["code"]))


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


# ---- mistakes


def swaps(file: Path) -> Iterator[tuple[str, str, str]]:
    """Name, right and wrong text of each rejection with the key or the code of the next one in the file."""
    found = rejections(file)
    text = file.read_text()
    for this, following in zip(found, found[1:] + found[:1], strict=True):
        for field in ("key", "code"):
            old, new = getattr(this, field), getattr(following, field)
            if old is not None and new is not None and old.value != new.value:
                name = (
                    f"{field} {new.value!r} for {old.value!r} in line {old.lineno} of {file.name}"
                )
                yield name, *_replaced(text, old, json.dumps(new.value))


def rewordings(file: Path) -> Iterator[tuple[str, str, str]]:
    """Name, right and wrong text of each message, its words spelled backwards."""
    text = file.read_text()
    tree = ast.parse(text)
    raised = [n.exc.args[0] for n in ast.walk(tree) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)
              and n.exc.args and not any(_of_call(file, n.exc))]  # fmt: skip
    rules = [argument for r in rejections(file) for argument in r.call.args[3:]]
    bound = [
        n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and _binds_text(n.targets[0])
    ]
    for node in [*raised, *rules, *bound]:
        if isinstance(node, ast.Starred):
            continue
        other = _Backwards().visit(ast.parse(ast.unparse(node), mode="eval").body)
        if ast.unparse(other) != ast.unparse(node):
            name = f"other words in line {node.lineno} of {file.name}"
            yield name, *_replaced(text, node, ast.unparse(other))


def _binds_text(target: ast.expr) -> bool:
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return any(isinstance(name, ast.Name) and name.id in ("rule", "fix") for name in names)


class _Backwards(ast.NodeTransformer):
    """Spells the words of strings backwards, and leaves values, names with `_` and numbers."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str):
            return node
        word = r"(?<![\w.'{])[a-z]{3,}(?![\w.'}])"
        return ast.Constant(re.sub(word, lambda found: found[0][::-1], node.value))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.FormattedValue:
        return node


def _replaced(text: str, node: ast.expr, new: str) -> tuple[str, str]:
    """The lines around a node, as many as make them unique in the text, and the same with `new` for the node."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    begin = starts[first] + len(lines[first].encode()[: node.col_offset].decode())
    end = starts[last] + len(lines[last].encode()[: node.end_col_offset].decode())
    while text.count(text[starts[first] : starts[last + 1]]) > 1:
        first = max(0, first - 1)
        last = last if first else last + 1
    right = text[starts[first] : starts[last + 1]]
    return right, text[starts[first] : begin] + new + text[end : starts[last + 1]]


def drawn(kind: str, count: int, seed: int, folders: list[Path]) -> str:
    """A file with `count` mistakes, for `run.py --mistakes`."""
    make = swaps if kind == "swap" else rewordings
    every = [
        (file, row) for folder in folders for file in source_files(folder) for row in make(file)
    ]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    rows = [f"    Mistake({name!r}, {str(file.relative_to(ROOT))!r}, {right!r}, {wrong!r}),\n"
            for file, (name, right, wrong) in chosen]  # fmt: skip
    return "from mistakes import Mistake\n\nMISTAKES = (\n" + "".join(rows) + ")\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("asserted", type=Path, nargs="?", help="what FORGE_REJECTIONS named")
    parser.add_argument("folders", type=Path, nargs="*", help="packages; all without any")
    parser.add_argument("--swap", type=int, metavar="COUNT")
    parser.add_argument("--reword", type=int, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folders = args.folders or sorted([*ROOT.glob("packages/*"), *ROOT.glob("apps/*")])
    if args.swap or args.reword:
        kind = "swap" if args.swap else "reword"
        print(drawn(kind, args.swap or args.reword, args.seed, folders), end="")
        return 0
    if args.asserted is None:
        parser.error("give the file that FORGE_REJECTIONS named, --swap or --reword")
    asserted = {tuple(json.loads(line)) for line in args.asserted.read_text().splitlines()}
    every = [r for folder in folders for file in source_files(folder) for r in rejections(file)]
    missed = [rejection for rejection in every if not is_asserted(rejection, asserted)]
    for rejection in missed:
        key, code = (node.value if node else "..." for node in (rejection.key, rejection.code))
        print(f"{rejection.file}:{rejection.call.lineno}: {key} {code}")
    print(f"{len(missed)} of {len(every)} rejections are asserted by no test")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
