"""Draw functions, or comments, of packages for a reader who has not seen them; seeded with the commit.

    python scripts/draw_functions.py forge_core forge_moe --number 40
    python scripts/draw_functions.py forge_core --comments

Prints JSON. A function comes with its file, qualified name, signature and docstring, without its body: the reader writes
its purpose and its likely callers, and another grades the answers against the code. A comment comes with the lines of
code around it: the reader says whether it gives a reason, limit or source that the lines do not show.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_MARK = re.compile(
    r"# (type|noqa|fmt|language|pragma|mypy|----|\([\w\s,.*/+-]+\)$|\([A-Z])"
)  # for tools, and shapes


def sources(packages: list[str]) -> list[Path]:
    """The modules of the packages, without copies of shared topics."""
    listed = subprocess.run(
        ["git", "ls-files", "packages/*/src/*.py", "apps/*/src/*.py"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    return [
        ROOT / file
        for file in listed
        if Path(file).parts[3] in packages and "_shared" not in Path(file).parts
    ]


def functions(file: Path) -> Iterator[dict[str, Any]]:
    """Every function of a module but special methods and nested ones."""

    def visit(node: ast.AST, prefix: str) -> Iterator[dict[str, Any]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name.startswith("__"):
                    continue
                returns = f" -> {ast.unparse(child.returns)}" if child.returns else ""
                yield {
                    "file": str(file.relative_to(ROOT)),
                    "name": f"{prefix}{child.name}",
                    "decorators": [ast.unparse(d) for d in child.decorator_list],
                    "signature": f"({ast.unparse(child.args)}){returns}",
                    "docstring": ast.get_docstring(child),
                }

    yield from visit(ast.parse(file.read_text()), "")


def comments(file: Path) -> Iterator[dict[str, Any]]:
    """Every comment of a module with the lines around it; a comment of several lines counts once."""
    text = file.read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        number = token.start[0]
        continued = number > 1 and lines[number - 2].lstrip().startswith("#")
        if token.type == tokenize.COMMENT and not continued and not _MARK.match(token.string):
            around = lines[max(number - 2, 0) : number + 4]
            yield {"file": str(file.relative_to(ROOT)), "line": number, "lines": around}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "packages", nargs="+", metavar="PACKAGE", help="import names, such as forge_core"
    )
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument(
        "--comments", action="store_true", help="draw comments instead of functions"
    )
    args = parser.parse_args()

    read = comments if args.comments else functions
    found = [entry for file in sources(args.packages) for entry in read(file)]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    drawn = random.Random(commit).sample(found, min(args.number, len(found)))
    print(json.dumps({"commit": commit, "of": len(found), "drawn": drawn}, indent=1))


if __name__ == "__main__":
    main()
