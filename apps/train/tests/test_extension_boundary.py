"""What the code may use of the trainer: no private attributes from outside, no optional features inside."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import forge_train
from forge_train.extensions import built_in
from forge_train.run.run import Run

ROOT = Path(__file__).parents[3]
TRAINER = Path(forge_train.__file__).parent / "loop/trainer.py"
STUDY = Path(forge_train.__file__).parent / "study"
#: Modules of the protocol and its calls; all others in extensions/ are features.
DISPATCHER = {"built_in", "callback", "extension"}
#: Tables and keys that belong to an extension.
OF_EXTENSIONS = {
    "expert_loads",
    "gradients_every_steps",
    "groups",
    "health",
    "lora",
    "moe",
    "profile",
    "replicas",
    "sample",
    "stages",
}
KINDS = {"Trainer", "Run", "RunView", "Extension", "Extensions", "Callback"}
KINDS |= {kind.__name__ for kind in built_in.ORDER if kind is not None}
#: Names that are read as one of them, whatever a file says.
USUAL = {"trainer", "run", "extension", "callback"}


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    """Python files outside forge_train, and those of its studies."""
    folders = ("packages", "apps", "tests", "examples", "benchmarks", "scripts")
    files = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    own = TRAINER.parents[1]
    # the benchmark takes turns with other sides step by step, for which no public way exists
    files = {f for f in files if f.parts[-3:] != ("benchmarks", "rows", "runner.py")}
    outside = sorted(f for f in files if own not in f.parents or STUDY in f.parents)
    texts = [(path, path.read_text()) for path in outside]
    return [(path, ast.parse(text)) for path, text in texts if any(kind in text for kind in KINDS)]


def last_name(node: ast.AST | None) -> str:
    """`c` of `a.b.c` and of `a.b.c(...)`, the text of a string."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Constant):
        return str(node.value).rpartition(".")[2]
    return getattr(node, "attr", None) or getattr(node, "id", "")


def names_of_objects(tree: ast.AST) -> set[str]:
    """Names that a file gives to trainers, runs and extensions: by their annotations, and by what is called."""
    found = set(USUAL)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and last_name(node.annotation) in KINDS:
            found.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and last_name(node.annotation) in KINDS:
            found.add(last_name(node.target))
        elif isinstance(node, ast.Assign) and last_name(node.value) in KINDS:
            found |= {last_name(target) for target in node.targets}
    return found | KINDS


def private_reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and names of underscored attributes of those objects, read, written or named in a string as for setattr."""
    objects = names_of_objects(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            pairs = [(node.value, node.attr)]
        elif isinstance(node, ast.Call):
            pairs = [(a, last_name(b)) for a, b in zip(node.args, node.args[1:])]
        else:
            continue
        for owner, name in pairs:
            private = name.startswith("_") and not name.startswith("__")
            if (
                private
                and isinstance(owner, ast.Attribute | ast.Name)
                and last_name(owner) in objects
            ):
                yield node.lineno, f"{last_name(owner)}.{name}"


def test_private_reads_are_found() -> None:
    text = """
def f(t: Trainer, other: Loader):
    t._save(), other._cursor, run._rows, mine._state
    monkeypatch.setattr(Health, "_probe", None)
mine = forge_train.Extension()
"""
    found = [name for _, name in private_reads(ast.parse(text))]
    assert sorted(found) == ["Health._probe", "mine._state", "run._rows", "t._save"]


def test_no_file_outside_reads_private_attributes_of_the_trainer_and_extensions() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in sources()
        for line, name in private_reads(tree)
    ]
    assert not found, "\n".join(found)


def test_the_trainer_has_few_public_names() -> None:
    (trainer,) = (
        node
        for node in ast.parse(TRAINER.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Trainer"
    )
    methods = {node.name for node in trainer.body if isinstance(node, ast.FunctionDef)}
    written = {
        node.attr
        for node in ast.walk(trainer)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and last_name(node.value) == "self"
    }
    public = {name for name in methods | written if not name.startswith("_")}
    assert len(public) <= 15, sorted(public)


def stored(node: ast.AST, owner: str) -> set[str]:
    """Attributes of a name that the code of `node` writes or declares."""
    return {
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute)
        and isinstance(found.ctx, ast.Store)
        and isinstance(found.value, ast.Name)
        and found.value.id == owner
    }


def test_all_state_of_the_loop_is_declared() -> None:
    """An attribute that a method makes on the way is found only by reading all methods."""
    tree = ast.parse(TRAINER.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    (init,) = (node for node in functions if node.name == "__init__")
    assert stored(tree, "self") == stored(init, "self")
    fields = {field.name for field in dataclasses.fields(Run)}
    assert stored(tree, "run") <= fields
    text = [line.strip() for line in TRAINER.read_text().splitlines()]
    for node in functions:
        body = text[node.lineno - 1 : node.end_lineno]
        assert sum(bool(line) and not line.startswith("#") for line in body) <= 45, node.name


def test_the_trainer_imports_no_optional_feature() -> None:
    imported, read = set(), set()
    for node in ast.walk(ast.parse(TRAINER.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "forge_train.extensions"
        ):
            imported.add(last_name(ast.Constant(node.module)))
        elif isinstance(node, ast.Attribute):
            read.add(node.attr)
    assert imported <= DISPATCHER
    assert not read & OF_EXTENSIONS
