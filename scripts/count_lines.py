"""Lines of source per package against their budgets, and names in each public surface."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = {
    "forge_core": 6000,
    "forge_parallel": 4000,
    "forge_moe": 3000,
    "forge_data": 3000,
    "forge_ckpt": 3000,
    "forge_resilience": 3500,
    "forge_vlm": 3500,
    "forge_train": 3000,
}


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
        sizes = {f: len(f.read_text().splitlines()) for f in package.rglob("*.py")}
        lines, largest = sum(sizes.values()), max(sizes, key=lambda f: sizes[f])
        total += lines
        over = "  OVER" if lines > BUDGET[package.name] else ""
        print(
            f"{package.name:18}{lines:7}{BUDGET[package.name]:8}{public_names(package):7}  "
            f"{largest.relative_to(package)} {sizes[largest]}{over}"
        )
    print(f"{'in all':18}{total:7}{25000:8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
