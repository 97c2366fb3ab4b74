"""The equivalence cells of a model, measured."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from forge_parallel.prove.processes import Outcome, on_ranks
from forge_parallel.prove.sides import Finding, ProveError, Values, one_process, rank_of_cell
from forge_parallel.prove.task import CELLS, Cell, Task

BOUND = 1e-5


@dataclass(frozen=True)
class Result:
    """A cell's verdict: "green", "red" or "refused".

    `errors` are the worst, max|a - b| / max|b|, by quantity: stream (behind each layer), loss, gradient,
    norm, weight. Of a red cell, `message` says where it first parts from one process; `parameter` and `layer`
    name it where there is one. `trace` is that of a rank that raised.
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
    worlds: Iterable[int] = (2, 4),
    only: str = "",
    vocab_size: int = 64,
    seq_len: int = 16,
    seed: int = 0,
    bound: float = BOUND,
    timeout: float = 60.0,
    say: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Train `build(**args)` in each layout of `CELLS` and compare it with one process in plain PyTorch.

        for result in prove("my_lab.model:build", roles={"*.up.*": "colwise", "*.down.*": "rowwise", ...}):
            print(result.cell, result.verdict, result.message)

    The model is called with tokens (B, S) of ids below `vocab_size`, and with positions and document_ids of
    that shape if its forward takes them; it returns logits (B, S, V) or something with `.logits`. Values are
    made fp32. Two steps of SGD with momentum and clipping on eight rows, which one process sees in one
    forward: a module that mixes rows is red. `roles` is a table as `parallel_roles()` gives it. `worlds` and
    `only` (part of a name) choose cells; `say` hears of each result as it comes.

    Ranks are forked: `build` may be a local function. Raises ProveError if the question cannot be asked: a
    builder that draws unseeded numbers, a forward that raises or draws in one process.
    Cost: a second or less a cell for a small model.
    """
    if dist.is_initialized():
        raise ProveError("prove must be called outside of a process group; end it first")
    made = _import(build) if isinstance(build, str) else build
    task = Task(made, dict(args or {}), roles, vocab_size, seq_len, seed)
    worlds = tuple(worlds)
    cells = [cell for cell in CELLS if cell.world in worlds and only in cell.name]
    if not cells:
        raise ProveError(
            f"worlds {worlds} and only {only!r} must leave a cell, and leave none; use 2 or 4"
        )
    for module in ("fsdp", "tensor", "pipelining"):  # once here instead of in every rank: a second
        importlib.import_module(f"torch.distributed.{module}")
    wanted = _truth(task, timeout)
    results = []
    for cell in cells:
        began = time.perf_counter()
        outcomes = on_ranks(cell.world, lambda c=cell: rank_of_cell(task, c, wanted), timeout)  # type: ignore[misc]
        results.append(_judge(cell, outcomes, wanted, bound, time.perf_counter() - began))
        if say is not None:
            say(results[-1])
    return results


def _import(name: str) -> Callable[..., nn.Module]:
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ProveError(
            f"{name!r} must be module:function, and cannot be imported ({error}); run where it can be, as "
            "my_lab.model:build"
        ) from error
    made: Callable[..., nn.Module] = found
    return made


def _truth(task: Task, timeout: float) -> Values:
    (outcome,) = on_ranks(1, lambda: one_process(task), timeout)
    if outcome.how == "returned":
        values: Values = outcome.value
        return values
    if outcome.how == "ProveError":
        raise ProveError(outcome.value)
    raise ProveError(
        f"the model must train in one process, and there {_said(outcome)}; mend build, its args, vocab_size or "
        f"seq_len\n{outcome.trace}"
    )


def _judge(
    cell: Cell, outcomes: list[Outcome], wanted: Values, bound: float, seconds: float
) -> Result:
    result = Result(cell.name, cell.world, "green", seconds=seconds)
    failed = [(o.at, rank, o) for rank, o in enumerate(outcomes) if o.how != "returned"]
    if failed:  # the first to fail knows why; the others have lost their connection
        _, rank, first = min(failed, key=lambda f: f[:2])
        if first.how == "ProveError":
            raise ProveError(first.value)
        if first.how == "Refused":
            return replace(result, verdict="refused", message=first.value)
        message = f"on rank {rank} {_said(first)}"
        return replace(result, verdict="red", message=message, trace=first.trace)
    findings = [finding for outcome in outcomes for finding in outcome.value]
    for finding in findings:
        errors = result.errors
        errors[finding.quantity] = max(errors.get(finding.quantity, 0.0), finding.error)
    if red := sorted(f for f in findings if not f.error <= bound):
        return replace(result, verdict="red", **_where(red, list(wanted.streams), bound))
    if nowhere := sorted(set(wanted.start) - {f.name for f in findings}):
        message = f"no rank holds {nowhere[0]}"
        return replace(result, verdict="red", message=message, parameter=nowhere[0])
    return result


def _said(outcome: Outcome) -> str:
    lost = outcome.how == "lost"
    return str(outcome.value) if lost else f"it raised {outcome.how}: {outcome.value}"


def _where(red: list[Finding], layers: list[str], bound: float) -> dict[str, Any]:
    """Message, parameter and layer of the first value that is off. The parameter is the one whose gradient
    is computed first; where the stream is off already, of those in that layer."""
    first = red[0]
    off = [f for f in red if f.quantity in ("gradient", "weight")]
    if first.quantity == "stream":
        off = [f for f in off if f.name.startswith(f"{first.name}.")]
    of = f" {'behind' if first.quantity == 'stream' else 'of'} {first.name}" if first.name else ""
    message = (
        f"{first.quantity}{of} in step {first.place[0] + 1} parts first, by {first.error:.1e} (bound "
        f"{bound:g})"
    )
    if not off:
        return {"message": message, "layer": first.name or None}
    parameter = off[0].name
    if first is not off[0]:
        message += f"; then {off[0].quantity} of {parameter}, by {off[0].error:.1e}"
    others = len({f.name for f in off}) - 1
    message += f"; {others} more parameters" if others else ""
    inside = [name for name in layers if parameter.startswith(f"{name}.")]
    layer = inside[0] if inside else parameter.rpartition(".")[0]
    return {"message": message, "parameter": parameter, "layer": layer}
