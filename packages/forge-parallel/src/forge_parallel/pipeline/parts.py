"""The protocol by which a model declares its parts, so that it can be split into stages."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge_parallel._shared.problems import Problem, invalid, problems_of
from forge_parallel.structure import Structure, structure_of


def parts_of(model: nn.Module, structure: Structure | None = None) -> Structure:
    """The structure of a model that can be cut: `model.pipeline_parts()`, checked against its children.

        def pipeline_parts(self):
            return {"first": ("embedding",), "blocks": "layers", "last": ("norm", "lm_head")}

    `blocks` names a ModuleDict, ModuleList or Sequential. A name in both `first` and `last` is tied: each of
    the two ends holds a copy of it. The forward must skip children that are None
    and take the stream (B, S, D), floats, where it takes token ids otherwise; it may index no block by
    number. "first_blocks" is the number of blocks that only work in the first stage (default 1), as those that take
    features of an encoder there. A model that cannot be cut says why as "refused". `structure` is that of `structure_of`, if it was found
    before. Raises ValueError, naming it, for a model without the method or with that reason, for a name that is no
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


def part_problems(model: nn.Module, structure: Structure | None = None) -> list[Problem]:
    """Why it cannot be cut into stages; empty if it can."""
    try:
        parts_of(model, structure)
    except ValueError as error:
        return list(problems_of(error))
    return []


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
    """{key: block}; keys are those of the whole model, also on a rank that has only some blocks."""
    container: Any = model._modules[parts.container]
    return dict(container._modules)
