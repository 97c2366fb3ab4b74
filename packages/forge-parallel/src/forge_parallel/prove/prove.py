"""The equivalence cells of a model, measured."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel.prove.processes import Outcome, run_on_ranks
from forge_parallel.prove.sides import ProveError, Reference, ValueKey, one_process, rank_of_cell
from forge_parallel.prove.task import CELLS, Cell, Task
from forge_parallel.structure import Blocks

BOUND = 1e-5


@dataclass(frozen=True)
class Result:
    """A cell's verdict: "green", "red" or "refused".

    `errors` are the worst, max|a - b| / max|b|, by quantity: stream (behind each layer), loss, gradient,
    norm, weight, text (greedy, of a model of transformers). Of a red cell, `message` names the first value that
    differs from one process, `parameter` and `layer` its module, if any. `trace` is the traceback of a rank that
    raised.
    """

    cell: str
    world: int
    verdict: str
    errors: dict[str, float] = field(default_factory=dict)
    message: str = ""
    parameter: str | None = None
    layer: str | None = None
    trace: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> float:
        """The largest error, 0 where nothing was compared."""
        return max(self.errors.values(), default=0.0)


def prove(
    build: Callable[..., nn.Module] | str,
    *,
    args: Mapping[str, Any] | None = None,
    roles: Mapping[str, Any] | None = None,
    blocks: Blocks | None = None,
    media: Callable[[Tensor], Mapping[str, Any]] | str | None = None,
    worlds: Iterable[int] = (2, 4),
    only: str = "",
    vocab_size: int = 64,
    seq_len: int = 16,
    seed: int = 0,
    bound: float = BOUND,
    timeout: float = 60.0,
    report: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Train `build(**args)` in each layout of `CELLS` and compare it with one process in plain PyTorch.

        for result in prove("my_lab.model:build", roles={"*.up.*": "colwise", "*.down.*": "rowwise", ...}):
            print(result.cell, result.verdict, result.message)

    The model is called with tokens (B, S) of ids below `vocab_size`, and with positions and document_ids of
    that shape if its forward takes them; it returns logits (B, S, V) or something with `.logits`. Values are
    made fp32. Two steps of SGD with momentum and clipping on eight rows, which one process computes in one forward:
    a module that mixes rows is red. Modules of dropout are off; under tp they are refused. `roles` is a table as of
    `parallel_roles()`, `blocks` as in `parallelize`. `media(tokens)` gives further inputs by name (`extra_inputs`),
    tensors or other values whose B rows a slice takes, and may put placeholders into the tokens; in the cell "branch by
    row" the ids of one rank's rows are below vocab_size / 2 and those of the other not, so that it can give the two
    different media, or one none. `worlds` and `only` (part of a name) select cells; `report` is
    called with each result.

    Ranks are forked: `build` may be a local function. Raises ProveError if a proof is impossible: a
    builder that draws unseeded numbers, a forward that raises or draws in one process.
    Cost: a second or less a cell for a small model.
    """
    if dist.is_initialized():
        raise ProveError("prove must be called outside of a process group; end it first")
    made = _import(build) if isinstance(build, str) else build
    given = _import(media) if isinstance(media, str) else media
    task = Task(partial(made, **(args or {})), roles, blocks, vocab_size, seq_len, seed, given)
    worlds = tuple(worlds)
    cells = [cell for cell in CELLS if cell.world in worlds and only in cell.name]
    if not cells:
        raise ProveError(
            f"worlds {worlds} and only {only!r} must leave a cell, and leave none; use 2 or 4"
        )
    for module in ("fsdp", "tensor", "pipelining"):  # once here instead of in every rank: a second
        importlib.import_module(f"torch.distributed.{module}")
    truths: dict[bool, tuple[Task, Reference]] = {}
    results = []
    for cell in cells:
        if cell.branches not in truths:
            own = replace(task, branches=cell.branches)
            truths[cell.branches] = own, _reference(own, timeout)
        task, reference = truths[cell.branches]
        began = time.perf_counter()
        outcomes = run_on_ranks(cell.world, partial(rank_of_cell, task, cell, reference), timeout)
        results.append(_judge(cell, outcomes, reference, bound, time.perf_counter() - began))
        if report is not None:
            report(results[-1])
    return results


def _import(name: str) -> Callable[..., Any]:
    try:
        found = pkgutil.resolve_name(name)
        if not callable(found):
            raise ValueError(f"a {type(found).__name__} cannot be called")
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise ProveError(
            f"{name!r} must be module:function, and cannot be imported ({error}); run where it can be, as "
            "my_lab.model:build"
        ) from error


def _reference(task: Task, timeout: float) -> Reference:
    """The values of one process, whose modules this one imports, too."""
    known = set(sys.modules)

    def run() -> tuple[Reference, list[str]]:
        return one_process(task), [name for name in sys.modules if name not in known]

    (outcome,) = run_on_ranks(1, run, timeout)
    if outcome.kind == "returned":
        reference, modules = outcome.value
        # so that no rank of any cell does: models of transformers took seconds in each
        for module in modules:
            with suppress(Exception):  # made up by code, not found by name: ranks make it up again
                importlib.import_module(module)
        return reference
    if outcome.kind == "ProveError":
        raise ProveError(outcome.value)
    if "fork-based multiprocessing" in str(outcome.value):
        raise ProveError(
            "this process has run a backward on a CUDA build of torch and must not have, as its forks then "
            "cannot run any; prove first, or in a process of its own: python -m forge_parallel.prove"
        )
    raise ProveError(
        f"the model must train in one process, and there {_describe(outcome)}; correct build, its args, vocab_size or "
        f"seq_len\n{outcome.trace}"
    )


def _judge(
    cell: Cell, outcomes: list[Outcome], reference: Reference, bound: float, seconds: float
) -> Result:
    result = Result(cell.name, cell.world, "green", seconds=seconds)
    failed = [(o.at, rank, o) for rank, o in enumerate(outcomes) if o.kind != "returned"]
    if failed:  # the first error is the cause; the others have lost their connection
        _, rank, first = min(failed)
        if first.kind == "ProveError":
            raise ProveError(first.value)
        if first.kind == "Refused":
            return replace(result, verdict="refused", message=first.value)
        message = f"on rank {rank} {_describe(first)}"
        return replace(result, verdict="red", message=message, trace=first.trace)
    errors = {key: 0.0 for key in reference.keys}  # in the order of their computation
    compared = set()
    for key, error in chain.from_iterable(outcome.value.items() for outcome in outcomes):
        _, quantity, name = key
        errors[key] = max(error, errors[key])
        result.errors[quantity] = max(error, result.errors.get(quantity, 0.0))
        compared.add(name)
    if red := [key for key, error in errors.items() if error > bound]:
        return replace(result, verdict="red", **_where(red, errors, bound))
    if missing := sorted(reference.start.keys() - compared):
        message = f"no rank holds {missing[0]}"
        return replace(result, verdict="red", message=message, parameter=missing[0])
    return result


def _describe(outcome: Outcome) -> str:
    lost = outcome.kind == "lost"
    return outcome.value if lost else f"it raised {outcome.kind}: {outcome.value}"


def _where(red: list[ValueKey], errors: dict[ValueKey, float], bound: float) -> dict[str, Any]:
    """Message, parameter and layer of the first value that is off. The parameter is the one whose gradient
    is computed first; where the stream is off already, of those in that layer."""
    step, quantity, name = red[0]
    of = f" {'behind' if quantity == 'stream' else 'of'} {name}" if name else ""
    message = f"{quantity}{of} in step {step + 1} differs first, by {errors[red[0]]:.1e} (bound {bound:g})"
    inside = f"{name}." if quantity == "stream" else ""
    parameters = [p for p in red if p[1] in ("gradient", "weight") and p[2].startswith(inside)]
    if not parameters:
        return {"message": message, "layer": name or None}
    _, quantity, parameter = parameters[0]
    if parameters[0] != red[0]:
        message += f"; then {quantity} of {parameter}, by {errors[parameters[0]]:.1e}"
    others = len({p[2] for p in parameters}) - 1
    message += f"; {others} more parameters" if others else ""
    layers = [name for _, quantity, name in errors if quantity == "stream"]
    owner = parameter.rpartition(".")[0]
    layer = next((layer for layer in layers if parameter.startswith(f"{layer}.")), owner)
    return {"message": message, "parameter": parameter, "layer": layer}
