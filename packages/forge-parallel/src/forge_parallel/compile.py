"""torch.compile, block by block.

One graph serves all blocks of a kind: a model of 80 layers compiles in the time of one. FSDP2's hooks around a block
stay outside of the compiled code, and so does recomputation: it calls the compiled code a second time, so that
contexts which replay decisions (routes of experts) run in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from forge_parallel._shared.problems import invalid
from forge_parallel._torch_compat import compiler, count_compilations, raise_recompile_limit
from forge_parallel.recompute import TrainingForward, is_selective
from forge_parallel.structure import Structure, mark, structure_of

__all__ = ["compile_blocks", "recompilations"]


def compile_blocks(
    model: nn.Module,
    backend: str = "inductor",
    *,
    memory_budget: float | None = None,
    structure: Structure | None = None,
) -> nn.Module:
    """Compile every block of `structure` (default: `structure_of(model)`; without blocks the model itself).

        compile_blocks(model)
        ... some steps ...
        print(recompilations())                          # {"graphs": 1, "recompiled": 0}

    Of a block that holds experts only the other modules are compiled (norms, attention): routes have
    data-dependent shapes. Names of parameters stay. Shapes are static, a graph for each. Without grad a block runs
    uncompiled: evaluation and generation use other shapes than training, and each would be compiled.

    The compiler itself decides which activations are recomputed in a backward. `memory_budget` is the fraction that it
    may save of those that it would save for speed; it recomputes the cheapest of the rest (0.7 saves about as much
    as selective recomputation, near 0 as little as full).
    Backends: "inductor"; "aot_eager" for tests.

    Call it after recompute and before FSDP2; returns the same object. Raises ValueError for a budget out
    of (0, 1], and for blocks that recompute selectively. Cost: seconds to a minute per kind of block, at
    the first step.
    """
    if memory_budget is not None and not 0 < memory_budget <= 1:
        rule = "must be above 0 and at most 1"
        raise invalid("memory_budget", "range", memory_budget, rule, "use 0.5 for half")
    blocks = (structure_of(model) if structure is None else structure).modules(model) or [model]
    if any(is_selective(module) for block in blocks for module in block.modules()):
        rule = "must go without compile, which chooses what to recompute by itself"
        fix = "use recompute = 'none' with memory_budget = 0.7, or recompute = 'full'"
        raise invalid("recompute", "excludes", "selective", rule, fix)
    from forge_parallel.axes.local import add_mixin  # late: DTensor costs half a second to import

    mark(model, "compile")
    graphs = compiler(backend, memory_budget)
    # by function: blocks of one class have one compiled code
    ready: dict[Any, Callable[..., Any]] = {}
    modules: list[Any] = [module for block in blocks for module in compiled_parts(block)]
    # one code object (the mixin's) may need a graph for each block
    raise_recompile_limit(max(64, len(modules) + 8))
    for module in modules:
        if not isinstance(module, TrainingForward):
            add_mixin(module, TrainingForward)
        # the plain function below the mixin: one code object for all blocks of a class, and no hooks in the graph
        forward = super(TrainingForward, module).forward.__func__
        if forward not in ready:
            ready[forward] = torch.compile(forward, backend=graphs, dynamic=False)
        module.compiled = ready[forward]
    return model


def recompilations() -> dict[str, int]:
    """`graphs` that this process has compiled, and how often the same code was `recompiled`: for another kind of
    block, or for a new shape or Python value. No cost.

    Both must stop growing after the first steps; otherwise the run compiles instead of training.
    """
    graphs, again = count_compilations()
    return {"graphs": graphs, "recompiled": again}


def holds_experts(module: nn.Module) -> bool:
    """Whether a parameter below is a stack of matrices, as experts are."""
    return any(p.dim() == 3 for p in module.parameters())


def compiled_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that `compile_blocks` compiles of a block: itself, or the largest ones without experts."""
    if not holds_experts(module):
        yield module
        return
    for child in module.children():
        if not holds_experts(child):
            yield child
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from compiled_parts(child)
