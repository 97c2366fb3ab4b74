"""The reference shares no code with Forge: it imports torch, numpy and the standard library only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "reference"
ALLOWED = {"torch", "numpy", *sys.stdlib_module_names}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, those of its own folder as .NAME, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [alias.name for alias in node.names]
            yield from [module] if node.module else [module + name for name in names]


def foreign(path: Path) -> list[str]:
    """Return the imports of a file that are neither allowed nor files next to it."""
    found = []
    for name in imported(path):
        if name.startswith("."):
            allowed = (path.parent / f"{name[1:]}.py").exists()
        else:
            allowed = name.split(".")[0] in ALLOWED - {"importlib"}
        if not allowed:
            found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("**/*.py")), ids=lambda path: path.name)
def test_reference_imports_torch_and_numpy_only(path):
    assert foreign(path) == []


@pytest.mark.parametrize(
    "line",
    [
        "import forge_core",
        "from forge_moe.router import Router",
        "def f():\n    import transformers.models",
        "from .missing import x",
        "from . import missing",
        "from ..draw import draw",
        "import importlib",
    ],
)
def test_other_imports_are_found(tmp_path, line):
    path = tmp_path / "module.py"
    path.write_text(f"import torch\nfrom numpy import array\nimport math\n{line}\n")
    assert len(foreign(path)) == 1
