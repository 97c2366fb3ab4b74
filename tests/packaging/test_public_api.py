"""Public names of packages: no other code imports private ones, and each change is a diff of docs/data/api."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.write_api_pages import (
    PACKAGES,
    ROOT,
    definition,
    pages,
    public_modules,
    public_names,
    tree,
    undocumented,
)

pytestmark = pytest.mark.lane("test")

#: Files that reach inside of packages, mostly to fail parts of them or to plant mistakes.
PATCHING = {
    "tests/equivalence/mutations.py": "plants mistakes",
    "tests/resume/test_store_boundary.py": "fails the disk",
    "tests/harness/src/forge_testing/disk.py": "holds and fails the disk",
    "tests/use/test_fused_loss.py": "cuts blocks smaller",
    "tests/chaos/plants.py": "plants faults and mistakes",
    "tests/use/test_time_machine.py": "plants a mistake in a feed-forward",
    "tests/documents/test_from_kempnerforge_code.py": "asks command lines for their help",
    "tests/exit_codes/grid.py": "plants faults",
    "tests/fuzz/files_images.py": "prepares images",
    "tests/vlm/test_prepared_forge.py": "prepares images",
    "tests/harness/src/forge_testing/faults.py": "reads processes of ranks",
    "tests/harness/src/forge_testing/processes.py": "adopts processes of ranks",
    "tests/slurm/test_site.py": "fails the disk",
    "tests/torch_versions/test_page.py": "changes what is installed",
    "apps/train/tests/test_sinks_of_runs.py": "fails a service",
    "apps/train/tests/test_rejected_folders.py": "fails a comparison",
    "apps/train/tests/test_tokenizing.py": "looks inside",
    "apps/lab/tests/test_old_spellings.py": "calls verbs without a process",
    "tests/null_gpu/test_jobs.py": "asks registries for every name that a job may choose",
    "tests/null_gpu/compared_places.py": "counts parts",
    "tests/null_gpu/places.py": "counts parts",
    "tests/null_gpu/routes.py": "forces routes",
    "tests/null_gpu/test_sizes.py": "forces routes",
    "tests/parallel/test_recompute_forge.py": "counts what a block repeats",
    "tests/parallel/test_units.py": "counts units of FSDP2",
    "scripts/write_command_line_page.py": "asks command lines for their help",
    "scripts/write_models_page.py": "asks registries for every family",
}
FOLDERS = ("apps", "benchmarks", "examples", "scripts", "tests", "packages")


def _python(path: Path) -> str:
    """The code of a file: its own, or that of the Python blocks of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return "\n".join(block for block in blocks if "..." not in block.split("\n")[0])


def _files() -> Iterator[Path]:
    for folder in FOLDERS:
        for kind in ("*.py", "*.md"):
            yield from (ROOT / folder).rglob(kind)
    yield from (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))


def _owners(path: Path) -> tuple[str, ...]:
    """The package that a file belongs to; the tests of the workspace are the applications' too."""
    parts = path.relative_to(ROOT).parts
    if parts[0] in ("packages", "apps"):
        return (f"forge_{parts[1].removeprefix('forge-')}",)
    return ("forge_train", "forge_lab") if parts[0] in ("tests", "scripts", "benchmarks") else ()


def _imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) of each import of a package of Forge."""
    try:
        found = ast.parse(_python(path))
    except SyntaxError:  # a page that shows a part of a program
        return
    for node in ast.walk(found):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)


def _is_public(module: str, name: str | None) -> bool:
    names = public_names(module)
    if name in (None, "*") or (names is not None and name in names):
        return names is not None
    return public_names(f"{module}.{name}") is not None if tree(f"{module}.{name}") else False


@pytest.mark.slow
def test_no_module_imports_private_names() -> None:
    private = []
    for path in _files():
        if str(path.relative_to(ROOT)) in PATCHING or path.parent == ROOT / "tests/shared":
            continue  # tests/shared has the tests of shared topics, of which packages have copies
        for module, name in _imports(path):
            package = module.split(".")[0]
            if (
                package in PACKAGES
                and package not in _owners(path)
                and not _is_public(module, name)
            ):
                private.append(f"{path.relative_to(ROOT)}: {module} {name or ''}")
    assert private == []


@pytest.mark.lane("quick")
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists_and_has_a_docstring(package: str) -> None:
    for module in public_modules(package):
        names = public_names(module) or ()
        assert list(names) == sorted(names, key=_order), module
        for name in names:
            if definition(module, name) is None:
                assert tree(f"{module}.{name}"), f"no {module}.{name}"
    assert list(undocumented(package)) == []


def _order(name: str) -> tuple[int, str]:
    """Constants, classes, functions: the order that ruff keeps `__all__` in."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_pages_are_those_of_the_sources() -> None:
    """A break of the API is a diff: python scripts/write_api_pages.py"""
    stale = [str(p) for p, text in pages().items() if p.read_text(encoding="utf-8") != text]
    assert stale == []


def test_a_package_shows_few_names() -> None:
    assert {
        p: len(public_names(p) or ()) for p in PACKAGES if len(public_names(p) or ()) > 40
    } == {}


@pytest.mark.parametrize(
    ("package", "late"), [("forge_data", "prepare"), ("forge_resilience", "slurm")]
)
def test_names_that_come_with_their_first_use_are_in_dir_and_help(package: str, late: str) -> None:
    script = (
        f"import pydoc, sys, {package} as p\n"
        f"assert '{package}.{late}' not in sys.modules\n"
        "assert set(p.__all__) <= set(dir(p))\n"
        "text = pydoc.plain(pydoc.render_doc(p))\n"
        "assert [name for name in p.__all__ if name not in text] == []\n"
        "assert all(getattr(p, name) is not None for name in p.__all__)\n"
        f"assert p.{late} is sys.modules['{package}.{late}']\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
