"""Lines of code per package against their budgets, and names in each public surface.

Blank lines, comments and docstrings are not counted: to explain costs nothing.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = {
    "forge_core": 4500,
    "forge_parallel": 5500,
    "forge_moe": 3000,
    "forge_data": 3200,
    "forge_ckpt": 3300,
    "forge_resilience": 3500,
    "forge_vlm": 3500,
    "forge_train": 3000,
}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(text: str) -> int:
    """Lines that hold a token of a statement, docstrings left out."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def public_names(package: Path) -> int:
    """Length of `__all__` in the package's __init__."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def main() -> int:
    total = 0
    print(f"{'package':18}{'lines':>7}{'budget':>8}{'names':>7}  largest file")
    folders = [*ROOT.glob("packages/*/src/*"), *ROOT.glob("apps/*/src/*")]
    for package in sorted(p for p in folders if (p / "__init__.py").exists()):
        sizes = {f: lines_of_code(f.read_text()) for f in package.rglob("*.py")}
        lines, largest = sum(sizes.values()), max(sizes, key=lambda f: sizes[f])
        total += lines
        over = "  OVER" if lines > BUDGET[package.name] else ""
        print(
            f"{package.name:18}{lines:7}{BUDGET[package.name]:8}{public_names(package):7}  "
            f"{largest.relative_to(package)} {sizes[largest]}{over}"
        )
    print(f"{'in all':18}{total:7}{sum(BUDGET.values()):8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
