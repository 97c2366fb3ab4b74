"""Write docs/data/api/*.txt and docs/protocols.md from the sources: hatch run python scripts/write_api_pages.py

A package's public names are those in `__all__` of the package and of its modules one level below. What they
are (signatures, fields, defaults) is read from the sources without importing them, so it is the same under
every version of Python.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    path.name: path
    for folder in ("packages", "apps")
    for path in sorted(ROOT.glob(f"{folder}/*/src/forge_*"))
}
#: Calls whose first argument or `default` is a field's default.
_SETTINGS = ("setting", "_field", "field")

PROTOCOLS_HEAD = """# Protocols

What objects of yours may offer to each package, generated from its `protocols` module. There is nothing to
subclass: a method or attribute of that name is enough. Names that a configuration can hold (models, mixers,
routers, optimizers, schedules, losses, sources, sinks, callbacks) are listed in [configuration.md](configuration.md).

"""


@cache
def tree(module: str) -> ast.Module | None:
    """The syntax tree of a module of Forge; None if there is no such module."""
    name, *below = module.split(".")
    path = PACKAGES[name].joinpath(*below)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")) if file.exists() else None


@cache
def public_names(module: str) -> tuple[str, ...] | None:
    """`__all__` of a module; None if it has none, lies too deep, or begins with an underscore."""
    parts, found = module.split("."), tree(module)
    if found is None or len(parts) > 2 or parts[-1].startswith("_"):
        return None
    for node in found.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    return None


def public_modules(package: str) -> list[str]:
    """The package and its public modules, by name."""
    files = sorted(PACKAGES[package].iterdir())
    below = [
        f"{package}.{p.stem}" for p in files if p.suffix == ".py" or (p / "__init__.py").exists()
    ]
    return [m for m in (package, *below) if "__init__" not in m and public_names(m) is not None]


def definition(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """(module, statement) where a name is defined, followed through imports; None for a submodule."""
    found = tree(module)
    assert found is not None, module
    for node in _statements(found.body):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("forge_"):
            for alias in node.names:
                if (alias.asname or alias.name) in (name, "*"):
                    own = name if alias.name == "*" else alias.name
                    return (
                        None if _is_module(f"{node.module}.{own}") else definition(node.module, own)
                    )
        elif name in _defined(node):
            return module, node
    return None


def _is_module(module: str) -> bool:
    package = tree(module.rpartition(".")[0])
    owns = package and any(
        module.rpartition(".")[2] in _defined(n) for n in _statements(package.body)
    )
    return tree(module) is not None and not owns


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under `if TYPE_CHECKING:` too."""
    for node in body:
        yield from node.body if isinstance(node, ast.If) else (node,)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


#: Methods that torch calls, whose contract the docstring of the class gives.
_OF_TORCH = ("forward", "backward", "extra_repr")


def undocumented(package: str) -> Iterator[str]:
    """Public functions, classes and methods of a package that have no docstring.

    A method that overrides a documented one of a base class in Forge needs none.
    """
    for module in public_modules(package):
        for name in public_names(module) or ():
            found = definition(module, name)
            if found is None or not isinstance(found[1], ast.FunctionDef | ast.ClassDef):
                continue
            if not ast.get_docstring(found[1]):
                yield f"{module}.{name}"
            for method in methods(found[1]):
                if not _explains(found, method):
                    yield f"{module}.{name}.{method}"


def methods(node: ast.stmt) -> dict[str, ast.FunctionDef]:
    """Public methods of a class by name, without those of torch."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    found = {m.name: m for m in body if isinstance(m, ast.FunctionDef)}
    return {n: m for n, m in found.items() if not n.startswith("_") and n not in _OF_TORCH}


def _explains(place: tuple[str, ast.stmt], method: str) -> bool:
    """Whether a class at (module, statement), or a base class of Forge, has a docstring for the method."""
    module, node = place
    own = methods(node).get(method)
    if own is not None and ast.get_docstring(own):
        return True
    bases = [ast.unparse(base).split("[")[0] for base in getattr(node, "bases", [])]
    found = [definition(module, base) for base in bases if base.isidentifier()]
    return any(_explains(base, method) for base in found if base is not None)


def describe(name: str, node: ast.stmt) -> Iterator[str]:
    """Lines that say all of a public name that a caller may depend on."""
    if isinstance(node, ast.FunctionDef):
        yield f"{name}{_signature(node)}"
    elif isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        marks = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
        yield f"{marks}class {name}({bases})" if bases else f"{marks}class {name}"
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and _is_public(member.name):
                marks = "".join(f"@{ast.unparse(d)} " for d in member.decorator_list)
                yield f"  {marks}{member.name}{_signature(member)}"
            elif isinstance(member, ast.AnnAssign) and _is_public(ast.unparse(member.target)):
                default = _default(member.value)
                yield f"  {ast.unparse(member.target)}: {ast.unparse(member.annotation)}{default}"
            elif isinstance(member, ast.Assign) and _is_public(ast.unparse(member.targets[0])):
                yield f"  {ast.unparse(member)}"
    else:
        yield f"{name} = {ast.unparse(node.value) if node.value else '...'}"  # type: ignore[attr-defined]


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__", "__len__", "__iter__")


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def _default(value: ast.expr | None) -> str:
    """` = default` of a field, without its help text."""
    by_name = ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in _SETTINGS:
        named = {k.arg: k.value for k in value.keywords}
        by_name = " (by name)" if "kw_only" in named else ""
        value = named.get("default", named.get("default_factory", next(iter(value.args), None)))
    return by_name if value is None else f" = {ast.unparse(value)}{by_name}"


def api_page(package: str) -> str:
    """The public API of a package: a section per module, a line per name, field and method."""
    lines = [f"# {package}: public names, generated by scripts/write_api_pages.py"]
    for module in public_modules(package):
        lines += ["", f"[{module}]"]
        for name in public_names(module) or ():
            found = definition(module, name)
            lines += describe(name, found[1]) if found else [f"{name}: module"]
    return "\n".join(lines) + "\n"


def protocols_page() -> str:
    """All protocols of all packages, as tables."""
    shared = ast.parse((ROOT / "scripts/shared/module_protocols.py").read_text(encoding="utf-8"))
    sections = {"Modules, for forge_core, forge_parallel, forge_moe and forge_vlm": shared}
    for package in PACKAGES:
        found = (
            tree(f"{package}.protocols") if (PACKAGES[package] / "protocols.py").exists() else None
        )
        if found is not None:
            sections[package] = found

    lines = [PROTOCOLS_HEAD.rstrip()]
    for title, found in sections.items():
        lines += ["", f"## {title}", "", (ast.get_docstring(found) or "").split("\n\n")[0]]
        for node in found.body:
            if isinstance(node, ast.ClassDef) and _is_protocol(node):
                lines += ["", f"### {node.name}", "", ast.get_docstring(node) or "", ""]
                lines += [f"- `{line.strip()}`{text}" for line, text in _members(node)]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0] == "Protocol" for base in node.bases)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """(member, ": what it is") of a protocol."""
    following = [*node.body[1:], None]
    for member, after in zip(node.body, following, strict=True):
        if isinstance(member, ast.FunctionDef):
            text = " ".join((ast.get_docstring(member) or "").split())
            yield f"{member.name}{_signature(member)}", f": {text}" if text else ""
        elif isinstance(member, ast.AnnAssign):
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = " ".join(str(after.value.value).split()) if told else ""  # type: ignore[union-attr,attr-defined]
            yield ast.unparse(member), f": {text}" if text else ""


def pages() -> dict[Path, str]:
    """What each page must hold."""
    api = {ROOT / f"docs/data/api/{package}.txt": api_page(package) for package in PACKAGES}
    return api | {ROOT / "docs/protocols.md": protocols_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
