"""The depth of a model: modules before its blocks, the blocks, and modules behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from forge_parallel._shared.problems import Problem, invalid, raise_problems

__all__ = ["Blocks", "Structure", "further_units", "stages_of", "structure_of"]

Blocks = str | Iterable[str | nn.Module]
"""A pattern of qualified names, or names, patterns and modules in order of depth."""

_LISTS = (nn.ModuleList, nn.ModuleDict)  # have no forward, so they cannot be blocks themselves


@dataclass(frozen=True)
class Structure:
    """Qualified names of modules, in order of depth; found once per model by `structure_of`.

    first   modules before the blocks. A name that is also in `last` is tied: both ends need it.
    blocks  units of sharding, recomputation and compilation; a module with several names has one here.
    last    modules behind the blocks.
    container  the child of the model that a pipeline splits, from `pipeline_parts()`, else "".
    chosen  a sentence about the chosen blocks, if neither the model nor its caller named any.
    first_blocks  fewest blocks that the first stage of a pipeline needs, from `pipeline_parts()`.
    """

    first: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    container: str = ""
    chosen: str = ""
    first_blocks: int = 1

    @property
    def tied(self) -> tuple[str, ...]:
        """Names in both ends."""
        return tuple(name for name in self.first if name in self.last)

    @property
    def ends(self) -> tuple[str, ...]:
        """All names but those of blocks, each once."""
        return tuple(dict.fromkeys((*self.first, *self.last)))

    def modules(self, part: nn.Module) -> list[nn.Module]:
        """The blocks in `part`: the model as it is now (a step may have replaced them), or a stage of it."""
        named = dict(part.named_modules(remove_duplicate=False))
        return [named[name] for name in self.blocks if name in named]


def structure_of(model: nn.Module, blocks: Blocks | None = None) -> Structure:
    """The structure of `model`, from its caller, the model itself, or its longest list of modules.

        structure_of(model, "encoder.layer.*").blocks          # a * stands for a part between two dots
        structure_of(model, ["stem", "stages.*.*"]).blocks     # several, in order of depth; [] for none

    Blocks are, in this order: `blocks`; `model.blocks()` or a container of that name; the children of the
    container that `model.pipeline_parts()` names; the longest ModuleList or ModuleDict whose children are
    alike (share a class below nn.Module), which `chosen` then describes. Lists inside of such children (experts) do
    not count, and a list of lists counts as all of its members.

    `first` and `last` are those of `pipeline_parts()`, else the modules registered before and behind the blocks.

    Raises ValueError for a pattern that fits no module, for blocks one inside another or without parameters,
    and where two lists are equally long. Reads names and shapes only; costs a walk over the modules.
    """
    parts: Any = getattr(model, "pipeline_parts", None)
    declared: dict[str, Any] = parts() if callable(parts) else {}
    container = str(declared.get("blocks", ""))
    chosen = ""
    if blocks is not None:
        found = _given(model, blocks)
    elif (offered := _offered(model)) is not None:
        found = _names_of(model, offered)
    elif container in model._modules:
        found = _names_of(model, list(getattr(model, container).children()))
    else:
        found, chosen = _longest(model)
    first, last = (declared["first"], declared["last"]) if declared else _ends(model, set(found))
    least = int(declared.get("first_blocks", 1))
    return Structure(tuple(first), tuple(found), tuple(last), container, chosen, least)


def further_units(model: nn.Module) -> list[nn.Module]:
    """Modules besides the blocks that are units of FSDP2 of their own, if the model names any (`sharding_units()`)."""
    offer: Any = getattr(model, "sharding_units", None)
    return list(offer()) if callable(offer) else []


def stages_of(model: nn.Module) -> list[nn.Module]:
    """The pipeline stages of this rank as `split` returned them, in order of depth; else the model alone."""
    return vars(model).get("pipeline_stages", [model])


def _offered(model: nn.Module) -> list[nn.Module] | None:
    """`model.blocks()`, or the children of a container of that name; None where there is neither."""
    offer: Any = getattr(model, "blocks", None)
    if isinstance(offer, (*_LISTS, nn.Sequential)):
        return list(offer.children())
    named = callable(offer) and not isinstance(offer, nn.Module)
    return list(offer()) if named else None


def _names_of(model: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    """Their qualified names, in this order, without repetition."""
    names = {module: name for name, module in model.named_modules()}
    for module in modules:
        if module not in names:
            rule = f"must be a module of {type(model).__name__}, and is not"
            fix = "return those that the model has registered"
            raise invalid("blocks", "unregistered", type(module).__name__, rule, fix)
    return [names[module] for module in dict.fromkeys(modules)]


def _given(model: nn.Module, blocks: Blocks) -> list[str]:
    """The blocks that the caller names, without repetition; ValueError with every name that cannot be a block."""
    found: dict[nn.Module, str] = {}
    problems = []
    for item in [blocks] if isinstance(blocks, str) else blocks:
        if isinstance(item, nn.Module):
            fits = {item: _names_of(model, [item])[0]}
        else:
            fits = {module: name for name, module in model.named_modules() if _fits(name, item)}
            if not fits:
                rule = f"must name modules of {type(model).__name__}, and fits none"
                children = ", ".join(n for n, _ in model.named_children()) or "none"
                fix = f"its children are {children}"
                problems.append(Problem("blocks", "not_found", item, rule, fix))
        found |= {module: name for module, name in fits.items() if module not in found}
    names = set(found.values())
    for module, name in found.items():
        if not any(True for _ in module.parameters()) or isinstance(module, _LISTS):
            rule = f"must have parameters and its own forward, and is a {type(module).__name__}"
            fix = "name the modules that are called"
            problems.append(Problem("blocks", "forward", name, rule, fix))
        if (outer := next((n for n in _above(name) if n in names), None)) is not None:
            rule = f"is inside {outer or 'the model'}, and no block may contain another"
            problems.append(Problem("blocks", "nested", name, rule, "name one of them"))
    raise_problems("", problems)
    return list(found.values())


def _fits(name: str, pattern: str) -> bool:
    """Whether a qualified name fits, part by part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _above(name: str) -> Iterator[str]:
    """The names of the modules around one."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _longest(model: nn.Module) -> tuple[list[str], str]:
    """The children of the longest list of like modules, and a sentence about the choice."""
    lists = dict(_lists(model, ""))
    longest = max(map(len, lists.values()), default=0)
    taken = [name for name, children in lists.items() if len(children) == longest]
    kind = type(model).__name__
    if len(taken) > 1:
        patterns = " or ".join(repr(f"{name}.*") for name in taken[:2])
        rule = f"hold {longest} modules each, and {kind} does not say which are its blocks"
        fix = f"pass blocks={patterns} (both in a list, if all are), or give it blocks()"
        raise invalid("blocks", "ambiguous", taken[:2], rule, fix)

    if not taken:
        return [], ""
    names = _names_of(model, lists[taken[0]])
    what = type(lists[taken[0]][0]).__name__
    return names, (
        f"{kind} does not say which are its blocks: taken are the {len(names)} {what} in {taken[0]}; blocks= "
        "of parallelize, or blocks() of the model, names others"
    )


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, list[nn.Module]]]:
    """The outermost lists of at least two like modules below: (name, children)."""
    children = list(dict.fromkeys(_members(module))) if isinstance(module, _LISTS) else []
    if len(children) > 1 and _alike(children):
        yield name, children
        return
    for key, child in module.named_children():
        yield from _lists(child, f"{name}.{key}" if name else key)


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """The members of a list and of the lists in it."""
    for child in module.children():
        yield from _members(child) if isinstance(child, _LISTS) else (child,)


def _alike(modules: list[nn.Module]) -> bool:
    """Whether they share a class below nn.Module and all have parameters."""
    shared = set.intersection(*(set(type(module).__mro__) for module in modules))
    own = any(issubclass(cls, nn.Module) for cls in shared - {nn.Module})
    return own and all(any(True for _ in module.parameters()) for module in modules)


def _ends(model: nn.Module, blocks: set[str]) -> tuple[list[str], list[str]]:
    """The largest modules with parameters that neither are nor hold blocks: those before, those behind."""
    around = {outer for name in blocks for outer in _above(name)}
    first: list[str] = []
    last: list[str] = []

    def walk(module: nn.Module, name: str, passed: bool) -> bool:
        for key, child in module.named_children():
            below = f"{name}.{key}" if name else key
            if below in blocks:
                passed = True
            elif below in around:
                passed = walk(child, below, passed)
            elif any(True for _ in child.parameters()):
                (last if passed else first).append(below)
        return passed

    walk(model, "", False)
    behind = {p for name in last for p in model.get_submodule(name).parameters()}
    tied = [n for n in first if any(p in behind for p in model.get_submodule(n).parameters())]
    return first, [*last, *tied]
