"""The modules of a package import one another without a circle, imports inside of functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.write_api_pages import PACKAGES

pytestmark = pytest.mark.lane("test")


def _modules(package: str) -> dict[str, Path]:
    """Every module of a package by name; a package's own name stands for its __init__."""
    root = PACKAGES[package].parent
    names = {
        p: ".".join(p.relative_to(root).with_suffix("").parts)
        for p in root.glob(f"{package}/**/*.py")
    }
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def _imports(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a file imports at run time."""
    found = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(found)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(found):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of one circle, in order; empty without any."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(graph[module]):
            if found := walk(imported, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in graph if (found := walk(module, []))), [])


@pytest.mark.lane("quick")
@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    modules = _modules(package)
    graph = {name: set(_imports(path, modules)) - {name} for name, path in modules.items()}
    assert _circle(graph) == []


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
