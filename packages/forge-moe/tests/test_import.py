"""Importing forge_moe loads torch, the standard library and itself."""

import ast
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import forge_moe

CODE = """
import sys
{first}
before = set(sys.modules)
import forge_moe
new = set(sys.modules) - before
tops = {{name.partition(".")[0] for name in new}} - {{"forge_moe", "torch"}} - set(sys.stdlib_module_names)
print(sorted(tops), sum(name.startswith("torch") for name in new))
"""


def test_nothing_beyond_torch_is_loaded() -> None:
    code = CODE.format(first="import torch")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, parts_of_torch = out.stdout.rsplit(" ", 1)
    assert names == "[]"
    assert int(parts_of_torch) < 20  # not the compiler, not DTensor


def test_public_names_exist_are_few_and_documented() -> None:
    assert len(forge_moe.__all__) <= 25
    assert len(set(forge_moe.__all__)) == len(forge_moe.__all__)
    for name in forge_moe.__all__:
        assert getattr(forge_moe, name).__doc__, name


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions included: a cycle that they hide still ties the modules together."""
    root = Path(forge_moe.__file__).parent
    files = {_module(file, root): file for file in root.rglob("*.py")}
    imports = {name: _imported(file, files.keys()) for name, file in files.items()}
    while leaves := {name for name, needed in imports.items() if not needed}:
        imports = {n: needed - leaves for n, needed in imports.items() if n not in leaves}
    assert not imports


def _module(file: Path, root: Path) -> str:
    return ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")


def _imported(file: Path, modules: Collection[str]) -> set[str]:
    """Modules of the package that a file imports: of `from a import b` a.b, or a if b is a name in it."""
    nodes = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)]
    names = [(n.module, f"{n.module}.{alias.name}") for n in nodes for alias in n.names]
    found = {whole if whole in modules else module for module, whole in names}
    return found & set(modules)
