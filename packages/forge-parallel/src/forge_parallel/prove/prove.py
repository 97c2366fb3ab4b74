"""The equivalence cells of a model, measured."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel._shared.problems import Problem, invalid
from forge_parallel.prove.cells import Cell, own_cell, standard_cells
from forge_parallel.prove.processes import Outcome, run_on_ranks
from forge_parallel.prove.settings import (
    ON_CPU,
    ONE_RANK,
    Facts,
    ProveError,
    Settings,
    describe,
    find_devices,
    make_settings,
    require_no_cuda,
)
from forge_parallel.prove.sides import STEPS, beside_the_cpu, one_process, one_rank, rank_of_cell
from forge_parallel.prove.task import Task
from forge_parallel.prove.values import Reference, ValueKey
from forge_parallel.structure import Blocks

SAME_IN_ONE_RANK = "; one rank in bf16 computes the same: it is the precision, not the layout"


@dataclass(frozen=True)
class Result:
    """A cell's verdict: "green", "red" or "refused".

    `errors` are the worst, max|a - b| / max|b|, by quantity: stream (behind each layer), loss, gradient,
    norm, weight, text (greedy, of a model of transformers, in fp32); in bf16 also "one rank", all of them beside one
    rank in bf16. Of a red cell, `message` names the first value that differs, `parameter` and `layer` its module, if
    any. `trace` is the traceback of a rank that raised, `problems` are those of its error.
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
    problems: tuple[Problem, ...] = ()

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
    device: str = "cpu",
    nproc: int | None = None,
    precision: str = "fp32",
    layouts: Sequence[Mapping[str, Any]] = (),
    worlds: Iterable[int] | None = None,
    only: str = "",
    vocab_size: int = 64,
    seq_len: int = 16,
    seed: int = 0,
    bound: float | None = None,
    timeout: float | None = None,
    header: Callable[[str], None] | None = None,
    report: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Train `build(**args)` in each layout of `CELLS` and compare it with one process in plain PyTorch.

        for result in prove("my_lab.model:build", roles={"*.up.*": "colwise", "*.down.*": "rowwise", ...}):
            print(result.cell, result.verdict, result.message)
        prove("my_lab.model:build", device="cuda", precision="bf16", layouts=[{"tp": 2, "pp": 2}])

    The model is called with tokens (B, S) of ids below `vocab_size`, and with positions and document_ids of
    that shape if its forward takes them; it returns logits (B, S, V) or something with `.logits`. Values are
    made fp32. Two steps of SGD with momentum and clipping on eight rows, which one process computes in one forward:
    a module that mixes rows is red. Modules of dropout are off; under tp they are refused. `roles` is a table as of
    `parallel_roles()`, `blocks` as in `parallelize`. `media(tokens)` gives further inputs by name (`extra_inputs`),
    tensors or other values whose B rows a slice takes, and may put placeholders into the tokens; in the cell "branch by
    row" the ids of one rank's rows are below vocab_size / 2 and those of the other not, so that it can give the two
    different media, or one none.

    Ranks compute on `device`, cpu (gloo) or cuda (GPU by rank, NCCL, compiled by inductor), and so does the one process;
    on a GPU one more cell compares it with the CPU. `nproc` bounds the ranks of a cell; default: the GPUs, or on cpu
    what `worlds` says. `worlds` and `only` (part of a name) select cells; default: (2, 4) on cpu without nproc, else
    all numbers up to nproc; none with `layouts`. Each of these is a cell of its own on `nproc` ranks: keys of
    ParallelConfig, and micro_batches. A step has as many more rows as its ranks need.

    `precision` fp32, tf32 (GPUs) or bf16 is that of the layouts; the one process computes in fp32. `bound` replaces
    the bounds of the precision on each quantity (docs/prove.md has them with their reasons). `timeout` is for a cell,
    in seconds; default 60, on GPUs 300. `header` is called once with a line that names devices, versions, settings
    and bounds, `report` with each result.

    Ranks are forked: `build` may be a local function, and this process must not have used CUDA. Raises ProveError if a
    proof is impossible: a builder that draws unseeded numbers, a forward that raises or draws in one process, a
    layout that breaks a rule, more ranks than GPUs. Cost: a second or less a cell for a small model on a CPU.
    """
    _require_alone()
    settings = make_settings(device, precision, bound)
    timeout = (300.0 if device == "cuda" else 60.0) if timeout is None else timeout
    if nproc is not None and nproc < 1:
        fix = "use the number of your GPUs or cores"
        raise invalid("nproc", "range", nproc, "must be at least 1", fix, kind=ProveError)
    _require_sizes(vocab_size, seq_len, seed, timeout)
    facts = _devices(nproc, timeout) if device == "cuda" else None
    nproc = facts.count if facts is not None and nproc is None else nproc
    cells = _cells(layouts, worlds, nproc, only, settings, seq_len)
    made = _import(build) if isinstance(build, str) else build
    given = _import(media) if isinstance(media, str) else media
    if device == "cuda":
        require_no_cuda()  # the modules of a lab may have used it
    builder = partial(made, **(args or {}))
    task = Task(builder, roles, blocks, vocab_size, seq_len, seed, given, settings=settings)
    if header is not None:
        header(describe(settings, facts, any(cell.layout.get("compile") for cell in cells)))
    for module in ("fsdp", "tensor", "pipelining"):  # once here instead of in every rank: a second
        importlib.import_module(f"torch.distributed.{module}")
    truths = _Truths(task, timeout)
    results = []
    for cell in cells:
        results.append(_measure(cell, truths))
        if report is not None:
            report(results[-1])
    return results


def _require_alone() -> None:
    if dist.is_initialized():
        rule = "must not exist where prove is called"
        raise invalid("process group", "running", ..., rule, "end it first", kind=ProveError)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        rule, size = "must be 1, as prove starts its own ranks", os.environ["WORLD_SIZE"]
        fix = "call it without torchrun, with --nproc"
        raise invalid("WORLD_SIZE", "ranks", size, rule, fix, kind=ProveError)


def _require_sizes(vocab_size: int, seq_len: int, seed: int, timeout: float) -> None:
    """Of tokens, as `Task.batch` draws them, and of what else a mistake would show as one of the model."""
    for name, value, least, most in (
        ("vocab_size", vocab_size, 2, 2**31),
        ("seq_len", seq_len, 2, 2**31),
        ("seed", seed, 0, 2**32 - 1),
    ):
        if not least <= value <= most:
            rule = f"must be at least {least} and at most {most}"
            raise invalid(name, "range", value, rule, "correct it", kind=ProveError)
    if not 0 < timeout <= 86400:
        rule = "must be above 0 and at most 86400 seconds"
        fix = "leave it out for the default"
        raise invalid("timeout", "range", timeout, rule, fix, kind=ProveError)


def _devices(nproc: int | None, timeout: float) -> Facts:
    """Of this machine, asked for in a child. NCCL refuses two ranks on one device."""
    (outcome,) = run_on_ranks(1, lambda _: find_devices(), timeout)
    if outcome.kind != "returned":
        rule = f"must have a GPU that torch can use, and asking for it, {_describe(outcome)}"
        fix = f"correct the driver, or use cpu\n{outcome.trace}"
        raise invalid("device", "requires", "cuda", rule, fix, kind=ProveError)
    facts: Facts = outcome.value
    if (nproc or 1) > facts.count:
        rule = f"must be at most the {facts.count} GPUs that this process sees, as NCCL refuses two ranks on one"
        fix = f"use {f'nproc {facts.count}' if facts.count else 'device cpu'}"
        raise invalid("nproc", "devices", nproc or 1, rule, fix, kind=ProveError)
    return facts


def _cells(
    layouts: Sequence[Mapping[str, Any]],
    worlds: Iterable[int] | None,
    nproc: int | None,
    only: str,
    settings: Settings,
    seq_len: int,
) -> list[Cell]:
    if layouts and nproc is None:
        rule = "must be given with layouts"
        raise invalid("nproc", "missing", ..., rule, "add nproc=4 (--nproc 4)", kind=ProveError)
    own = [own_cell(layout, nproc or 1, settings, seq_len) for layout in layouts]
    if worlds is None:
        worlds = () if layouts else (2, 4) if nproc is None else range(1, nproc + 1)
    counts = [world for world in worlds if nproc is None or world <= nproc]
    cells = [*own, *standard_cells(counts, only, settings)]
    if not cells:
        rule = f"and only {only!r} must leave a cell, and leave none"
        fix = "use 1, 2, 4 or 8 ranks, and a part of a name in docs/prove.md"
        raise invalid("worlds", "empty", counts, rule, fix, kind=ProveError)
    return cells


class _Truths:
    """What cells are compared with, each computed once."""

    def __init__(self, task: Task, timeout: float) -> None:
        self._task, self.timeout = task, timeout
        self._known: dict[Any, Reference] = {}

    def of(self, cell: Cell) -> tuple[Task, dict[str, Reference]]:
        """The task with the batches of this cell, and the truths by name: "" is one process in fp32."""
        settings = self._task.settings
        rows = cell.rows(settings)
        task = replace(self._task, branches=cell.branches, rows=rows)
        if cell.on_host:
            return task, {ON_CPU: self._one_process(task, "cpu")}
        found = {"": self._one_process(task, settings.device)}
        if settings.precision == "bf16" and cell.rounds_as_one_rank(settings):
            alone = Cell(
                "",
                1,
                micro_batches=cell.config(settings).axes(cell.world).batch_size
                * cell.micro_batches,
            )
            run = partial(one_rank, task, alone, found[""])
            key = cell.branches, rows, alone.micro_batches
            found[ONE_RANK] = self._run(key, run, settings.device)
        return task, found

    def _one_process(self, task: Task, device: str) -> Reference:
        known = set(sys.modules)

        def run(where: Any) -> tuple[Reference, list[str]]:
            # of a proof on GPUs this process imports none: some use CUDA, and it could not be forked any more
            fresh = [] if task.settings.device == "cuda" else sys.modules
            return one_process(task, where), [name for name in fresh if name not in known]

        return self._run((task.branches, task.rows, device), run, device)

    def _run(self, key: Any, run: Callable[..., Any], device: str) -> Reference:
        if key not in self._known:
            self._known[key] = _reference(run, self.timeout, device)
        return self._known[key]


def _measure(cell: Cell, truths: _Truths) -> Result:
    task, found = truths.of(cell)
    began = time.perf_counter()
    of_rank = partial(beside_the_cpu, task) if cell.on_host else partial(rank_of_cell, task, cell)
    outcomes = run_on_ranks(
        cell.world, partial(of_rank, [*found.values()]), truths.timeout, task.settings.device
    )
    return _judge(cell, outcomes, found, task.settings.bounds, time.perf_counter() - began)


def _import(name: str) -> Callable[..., Any]:
    try:
        found = pkgutil.resolve_name(name)
        if not callable(found):
            raise ValueError(f"a {type(found).__name__} cannot be called")
        return found
    except (ImportError, AttributeError, ValueError) as error:
        rule = f"cannot be imported ({error}), and must be module:function"
        fix = "run where it can be, as my_lab.model:build"
        raise invalid("import", "not_found", name, rule, fix, kind=ProveError) from error
    except (Exception, SystemExit) as error:  # of the module's own code
        rule = f"must be module:function, and importing it raised {type(error).__name__}: {error}"
        fix = f"correct the module\n{traceback.format_exc()}"
        raise invalid("import", "raised", name, rule, fix, kind=ProveError) from error


def _reference(run: Callable[..., Any], timeout: float, device: str) -> Reference:
    """The values of one process; this one imports the modules that it says it imported."""
    (outcome,) = run_on_ranks(1, run, timeout, device)
    if outcome.kind == "returned":
        if isinstance(outcome.value, Reference):
            return outcome.value
        reference: Reference
        reference, modules = outcome.value
        # so that no rank of any cell does: models of transformers took seconds in each
        for module in modules:
            with suppress(Exception):  # made up by code, not found by name: ranks make it up again
                importlib.import_module(module)
        return reference
    if outcome.kind == "ProveError":
        raise ProveError(outcome.problems)
    if "fork-based multiprocessing" in str(outcome.value):
        rule = "must not have run a backward on a CUDA build of torch, as its forks then cannot run any"
        fix = "prove first, or in a process of its own: python -m forge_parallel.prove"
        raise invalid("this process", "backward", ..., rule, fix, kind=ProveError)
    rule = f"must train in one process, and there {_describe(outcome)}"
    fix = f"correct build, its args, vocab_size, seq_len or timeout\n{outcome.trace}"
    raise invalid("model", "raised", ..., rule, fix, kind=ProveError)


def _judge(
    cell: Cell,
    outcomes: list[Outcome],
    truths: Mapping[str, Reference],
    bounds: Mapping[str, float],
    seconds: float,
) -> Result:
    result = Result(cell.name, cell.world, "green", seconds=seconds)
    failed = [(o.at, rank, o) for rank, o in enumerate(outcomes) if o.kind != "returned"]
    if failed:  # the first error is the cause; the others have lost their connection
        _, rank, first = min(failed)
        if first.kind == "ProveError":
            raise ProveError(first.problems)
        result = replace(result, problems=first.problems)
        if first.kind == "Refused":
            return replace(result, verdict="refused", message=first.value)
        message = f"on rank {rank} {_describe(first)}"
        return replace(result, verdict="red", message=message, trace=first.trace)
    red: dict[str, Any] = {}
    began = STEPS  # of the step that is red first
    for number, (truth, reference) in enumerate(truths.items()):
        errors = {key: 0.0 for key in reference.keys}  # in the order of their computation
        compared = set()
        for outcome in outcomes:
            for key, error in outcome.value[number].items():
                errors[key] = max(error, errors[key])
                quantity = ONE_RANK if truth == ONE_RANK else key[1]
                result.errors[quantity] = max(error, result.errors.get(quantity, 0.0))
                compared.add(key[2])
        bound = {key: bounds[truth or key[1]] for key in errors}
        if out := [key for key, error in errors.items() if error > bound[key]]:
            red = red or _where(out, errors, bound[out[0]], truth)
            began = out[0][0]
        elif missing := sorted(reference.start.keys() - compared):
            red = red or {"message": f"no rank holds {missing[0]}", "parameter": missing[0]}
        elif truth == ONE_RANK and began == 0:
            red["message"] += SAME_IN_ONE_RANK
    return replace(result, verdict="red", **red) if red else result


def _describe(outcome: Outcome) -> str:
    lost = outcome.kind == "lost"
    return outcome.value if lost else f"it raised {outcome.kind}: {outcome.value}"


def _where(
    red: list[ValueKey], errors: dict[ValueKey, float], bound: float, truth: str
) -> dict[str, Any]:
    """Message, parameter and layer of the first value that is off. The parameter is the one whose gradient
    is computed first; where the stream is off already, of those in that layer."""
    step, quantity, name = red[0]
    of = f" {'behind' if quantity == 'stream' else 'of'} {name}" if name else ""
    beside = {ONE_RANK: " from one rank in bf16", ON_CPU: " from the CPU"}.get(truth, "")
    message = f"{quantity}{of} in step {step + 1} differs first{beside}, by {errors[red[0]]:.1e} (bound {bound:g})"
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
