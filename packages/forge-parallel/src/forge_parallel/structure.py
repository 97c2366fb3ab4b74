"""The structure of a model: its blocks in order of depth, the modules before and after them, and the steps done on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from forge_parallel._shared.problems import Problem, invalid, raise_problems

__all__ = [
    "Blocks",
    "OrderError",
    "Structure",
    "blocks_by_key",
    "further_units",
    "mark",
    "parts_of",
    "stages_of",
    "stream_dim",
    "structure_of",
]

Blocks = str | Iterable[str | nn.Module]
"""A pattern of qualified names, or names, patterns and modules in order of depth."""

_LISTS = (nn.ModuleList, nn.ModuleDict)  # have no forward, so they cannot be blocks themselves


@dataclass(frozen=True)
class Structure:
    """Qualified names of modules, in order of depth; found once per model by `structure_of`.

    first   modules before the blocks. A name that is also in `last` is tied: both ends need it.
    blocks  modules that are sharded, recomputed and compiled one by one; one with several names has one here.
    last    modules after the blocks.
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

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The blocks in the model as it is now (a step may have replaced them), or in a stage of it."""
        named = dict(model.named_modules(remove_duplicate=False))
        return [named[name] for name in self.blocks if name in named]


def structure_of(model: nn.Module, blocks: Blocks | None = None) -> Structure:
    """The structure of `model`, from its caller, the model itself, or its longest list of modules.

        structure_of(model, "encoder.layer.*").blocks          # a * stands for one name between dots
        structure_of(model, ["stem", "stages.*.*"]).blocks     # several, in order of depth; [] for none

    Blocks are, in this order: `blocks`; `model.blocks()` or a container of that name; the children of the
    container that `model.pipeline_parts()` names; the longest ModuleList or ModuleDict whose children are
    alike (share a class below nn.Module), which `chosen` then describes. Lists inside of such children (experts) do
    not count, and a list of lists counts as all of its members.

    `first` and `last` are those of `pipeline_parts()`, else the modules registered before and after the blocks.

    Raises ValueError for a pattern that fits no module, for blocks one inside another or without parameters,
    and where two lists are equally long. Reads names and shapes only; costs a walk over the modules.
    """
    declare: Any = getattr(model, "pipeline_parts", None)
    declared: dict[str, Any] = declare() if callable(declare) else {}
    container = str(declared.get("blocks", ""))
    chosen = ""

    if blocks is not None:
        found = _blocks_of_caller(model, blocks)
    elif (own := _blocks_of_model(model)) is not None:
        found = _names_of(model, own)
    elif container in model._modules:
        found = _names_of(model, list(getattr(model, container).children()))
    else:
        found, chosen = _longest_list(model)

    first, last = (
        (declared["first"], declared["last"]) if declared else _ends_by_position(model, set(found))
    )
    least = int(declared.get("first_blocks", 1))
    return Structure(tuple(first), tuple(found), tuple(last), container, chosen, least)


def further_units(model: nn.Module) -> list[nn.Module]:
    """Modules besides the blocks that FSDP2 wraps by themselves, if the model names any (`sharding_units()`)."""
    declare: Any = getattr(model, "sharding_units", None)
    return list(declare()) if callable(declare) else []


def stages_of(model: nn.Module) -> list[nn.Module]:
    """The pipeline stages of this rank as `split` returned them, in order of depth; else only the model."""
    return vars(model).get("pipeline_stages", [model])


def _blocks_of_model(model: nn.Module) -> list[nn.Module] | None:
    """`model.blocks()`, or the children of a container of that name; None where there is neither."""
    blocks: Any = getattr(model, "blocks", None)
    if isinstance(blocks, (*_LISTS, nn.Sequential)):
        return list(blocks.children())
    is_method = callable(blocks) and not isinstance(blocks, nn.Module)
    return list(blocks()) if is_method else None


def _names_of(model: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    """Their qualified names, in this order, without repetition."""
    names = {module: name for name, module in model.named_modules()}
    for module in modules:
        if module not in names:
            rule = f"must be a module of {type(model).__name__}, and is not"
            fix = "return those that the model has registered"
            raise invalid("blocks", "unregistered", type(module).__name__, rule, fix)
    return [names[module] for module in dict.fromkeys(modules)]


def _blocks_of_caller(model: nn.Module, blocks: Blocks) -> list[str]:
    """The blocks that the caller names, without repetition; ValueError with every name that cannot be a block."""
    found: dict[nn.Module, str] = {}
    problems = []
    for item in [blocks] if isinstance(blocks, str) else blocks:
        if isinstance(item, nn.Module):
            fits = {item: _names_of(model, [item])[0]}
        else:
            fits = {module: name for name, module in model.named_modules() if _matches(name, item)}
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
        if (outer := next((n for n in _parents(name) if n in names), None)) is not None:
            rule = f"is inside {outer or 'the model'}, and no block may contain another"
            problems.append(Problem("blocks", "nested", name, rule, "name one of them"))
    raise_problems("", problems)
    return list(found.values())


def _matches(name: str, pattern: str) -> bool:
    """Whether a qualified name matches; a * matches no dot."""
    names, wanted = name.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def _parents(name: str) -> Iterator[str]:
    """The names of the modules around one."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _longest_list(model: nn.Module) -> tuple[list[str], str]:
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


def _ends_by_position(model: nn.Module, blocks: set[str]) -> tuple[list[str], list[str]]:
    """The largest modules with parameters that neither are nor hold blocks: (before the blocks, after them)."""
    around = {outer for name in blocks for outer in _parents(name)}
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
    after = {p for name in last for p in model.get_submodule(name).parameters()}
    tied = [n for n in first if any(p in after for p in model.get_submodule(n).parameters())]
    return first, [*last, *tied]


def parts_of(model: nn.Module, structure: Structure | None = None) -> Structure:
    """The structure of a model for a pipeline: `model.pipeline_parts()`, checked against its children.

        def pipeline_parts(self):
            return {"first": ("embedding",), "blocks": "layers", "last": ("norm", "lm_head")}

    `blocks` names a ModuleDict, ModuleList or Sequential. A name in both `first` and `last` is tied: each of
    the two ends holds a replica of it. The forward must skip children that are None
    and take the stream (B, S, D), floats, where it takes token ids otherwise; it may index no block by
    number. "first_blocks" is the number of blocks that only work in the first stage (default 1), as those that take
    features of an encoder there. A model that cannot be split gives the reason as "refused".
    `structure` is that of `structure_of`, if it was found before. Raises ValueError, naming it, for a model without the method or with that reason, for a name that is no
    child, for a child with parameters that no part names, and for parameters of the model itself.
    """
    kind, declare = type(model).__name__, getattr(model, "pipeline_parts", None)
    if not callable(declare):
        rule = f"must be a method of {kind} to split it into pipeline stages, and it has none"
        fix = "add it (see forge_parallel.pipeline.parts_of), or use pp 1"
        raise invalid("pipeline_parts", "missing", ..., rule, fix)
    if reason := declare().get("refused"):
        rule = f"of {kind} must allow pipeline stages, and does not: {reason}"
        raise invalid("pipeline_parts", "unsupported", ..., rule, "use pp 1")

    parts = structure_of(model) if structure is None else structure
    children = model._modules
    unknown = [name for name in (*parts.ends, parts.container) if name not in children]
    if unknown or not isinstance(
        children[parts.container], nn.ModuleDict | nn.ModuleList | nn.Sequential
    ):
        rule = f"must be a child of {kind} (blocks: a ModuleDict, ModuleList or Sequential)"
        wrong, fix = ", ".join(unknown) or parts.container, "name attributes of the model"
        raise invalid("pipeline_parts", "child", wrong, rule, fix)

    # stages hold children, so a parameter of the model itself would belong to none
    own = [name for name, p in model._parameters.items() if p is not None]
    forgotten = [
        name
        for name, child in children.items()
        if child is not None and name not in (*parts.ends, parts.container)
        if any(True for _ in child.parameters())
    ]
    if own or forgotten:
        rule = f"of {kind} must belong to a stage, and pipeline_parts() names none of them"
        fix = "put it into a module that `first` or `last` names"
        raise invalid("pipeline_parts", "stage", ", ".join(own + forgotten), rule, fix)
    return parts


def stream_dim(model: nn.Module) -> int:
    """Width D of the stream (B, S, D) between stages, as a model or a stage of it declares it.

        def pipeline_parts(self):
            return {"first": ("stem",), "blocks": "tower", "last": ("head",), "dim": 512}

    Without "dim" it is `model.config.dim`. ValueError, naming the model, if it declares neither.
    """
    declared: Any = model.pipeline_parts()  # type: ignore[operator]
    dim = declared.get("dim", getattr(getattr(model, "config", None), "dim", None))
    if type(dim) is not int or dim < 1:
        rule = f"must be the width of the stream of {type(model).__name__}"
        fix = 'let pipeline_parts() name it as "dim", or give the model a config with dim'
        raise invalid("dim", "type", dim, rule, fix)
    return dim


def blocks_by_key(model: nn.Module, parts: Structure) -> dict[str, nn.Module]:
    """{key: block}; keys are those of the full model, also on a rank that has only some blocks."""
    container: Any = model._modules[parts.container]
    return dict(container._modules)


STEPS = ("float8", "split", "tensor", "context", "recompute", "compile", "fsdp")
_MARK = "_forge_steps"


class OrderError(RuntimeError):
    """`step` was called on a model after `after`, which must follow it (or is the same step)."""

    def __init__(self, step: str, after: str) -> None:
        self.step, self.after = step, after
        if step == after:
            text = f"{step} was done on this model; do it once"
        else:
            text = (
                f"{step} must come before {after}, which was done; the order is {', '.join(STEPS)}"
            )
        super().__init__(text)


def mark(model: nn.Module, step: str) -> None:
    """Record on every module of `model` with parameters that `step` is done; call it at the start of the step.

        mark(model, "tensor")

    Raises OrderError, and marks nothing, if a later step or the same one was done on any of them. The
    mark is a plain attribute: not in the state dict, but in deep copies. No cost beyond a walk.
    """
    number = STEPS.index(step)
    # modules without parameters are not marked: stages that are prepared one after another may share them
    modules = [m for m in model.modules() if m is model or any(True for _ in m.parameters())]
    done = {name for module in modules for name in module.__dict__.get(_MARK, ())}
    for later in (*STEPS[number + 1 :], step):
        if later in done:
            raise OrderError(step, after=later)
    for module in modules:
        module.__dict__[_MARK] = (*module.__dict__.get(_MARK, ()), step)
