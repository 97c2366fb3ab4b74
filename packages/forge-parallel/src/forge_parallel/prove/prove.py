"""Prove the equivalence cells of a model: train it in each layout and compare it with one process."""

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

from forge_parallel._renamed import renamed_arguments
from forge_parallel._shared.problems import Problem
from forge_parallel.prove import settings as proof_settings
from forge_parallel.prove.cells import Cell, select_cells
from forge_parallel.prove.processes import ExitStatus, run_on_ranks
from forge_parallel.prove.ranks import one_rank, rank_of_cell
from forge_parallel.prove.settings import ON_CPU, ONE_RANK, Devices, ProveError, prove_error
from forge_parallel.prove.task import Task
from forge_parallel.prove.values import (
    STEPS,
    Reference,
    ValueKey,
    compare_with_cpu,
    one_process,
    width_of_logits,
)
from forge_parallel.structure import Blocks

SAME_IN_ONE_RANK = "; one rank in bf16 computes the same: it is the precision, not the layout"


@dataclass(frozen=True)
class Result:
    """A cell's verdict: "green", "red" or "refused" (the layout is not supported for this model).

    errors     largest max|a - b| / max|b| by quantity: stream (after each layer), loss, gradient, norm, weight, text
               (greedy, of a model of transformers, in fp32); in bf16 also "one rank": all quantities against one rank
    message    of a red cell: the first value that differs, or the error of a rank
    parameter  and `layer`: the module of that value, if it has one
    trace      traceback of a rank that raised, with the `problems` of its error
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


@renamed_arguments(bound="tolerance")
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
    vocab_size: int | None = None,
    seq_len: int = 16,
    seed: int = 0,
    tolerance: float | None = None,
    timeout: float | None = None,
    header: Callable[[str], None] | None = None,
    report: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Train `build(**args)` in each layout of `CELLS` and compare it with one process in plain PyTorch.

        for result in prove("my_lab.model:build", roles={"*.up.*": "colwise", "*.down.*": "rowwise", ...}):
            print(result.cell, result.verdict, result.message)
        prove("my_lab.model:build", device="cuda", precision="bf16", layouts=[{"tp": 2, "pp": 2}])

    The forward is called with tokens (B, S) below `vocab_size`, and with positions and document_ids of that shape if it
    takes them. It returns logits (B, S, V) or an output with `.logits`. A step has 8 sequences, or as many more as the
    ranks of a cell need. Two steps of SGD with momentum and clipping are compared. Floats become fp32.
    One process computes a step in one forward, so a module that mixes sequences is red. Dropout is off; under tp it is
    not supported.

    build       function or "module:function"; gets `args`
    vocab_size  token ids are below it; default V, as ids of each tp rank's part of the vocabulary must come
    roles       table as from `parallel_roles()`
    blocks      as in `parallelize`
    media       media(tokens) returns further inputs by name (`extra_inputs`), whose B rows a slice takes, and may write
                placeholders into the tokens. In the cell "branch by row" the ids of one rank are below vocab_size / 2
                and those of the other are not, so the two can get different media, or one none
    device      "cpu" (gloo) or "cuda" (a GPU per rank, NCCL, inductor), also of the one process; on GPUs one more cell
                compares it with the CPU
    nproc       most ranks of a cell; default: the GPUs, or on a CPU the largest of `worlds`
    precision   of the layouts: "fp32", "tf32" (GPUs) or "bf16"; the one process computes in fp32
    layouts     the caller's own layouts, a cell each on `nproc` ranks: keys of ParallelConfig, and micro_batches
    worlds      numbers of ranks; default (2, 4) on a CPU without nproc, else 1 to nproc; with `layouts` none
    only        part of the names of the cells to run
    tolerance   in place of the bounds of the precision (docs/prove.md has them with their reasons)
    timeout     seconds of a cell; default 60, on GPUs 300
    header      called once with a line of devices, versions, settings and bounds
    report      called with each result

    Ranks are forked: `build` may be a local function, and this process must not have used CUDA. Raises ProveError if a
    proof is impossible: a builder that draws unseeded numbers, a forward that raises or draws in one process, a
    layout that breaks a rule, more ranks than GPUs. Cost: a second or less per cell for a small model on a CPU.
    """
    _require_no_group()
    settings = proof_settings.make_settings(device, precision, tolerance)
    on_gpu = device == "cuda"
    timeout = (300.0 if on_gpu else 60.0) if timeout is None else timeout
    if nproc is not None and nproc < 1:
        fix = "use the number of your GPUs or cores"
        raise prove_error("nproc", "range", nproc, "must be at least 1", fix)
    _require_sizes(2 if vocab_size is None else vocab_size, seq_len, seed, timeout)
    devices = _find_devices(nproc, timeout) if on_gpu else None
    nproc = devices.count if devices is not None and nproc is None else nproc
    cells = select_cells(layouts, worlds, nproc, only, settings, seq_len)

    made = _import(build) if isinstance(build, str) else build
    given = _import(media) if isinstance(media, str) else media
    if on_gpu:
        proof_settings.require_no_cuda()  # the imported modules may have used it
    builder = partial(made, **(args or {}))
    task = Task(builder, roles, blocks, vocab_size or 2, seq_len, seed, given, settings=settings)
    if header is not None:
        compiles = any(cell.layout.get("compile") for cell in cells)
        header(proof_settings.describe_settings(settings, devices, compiles))
    for module in ("fsdp", "tensor", "pipelining"):  # once here, not in every rank: a second each
        importlib.import_module(f"torch.distributed.{module}")

    known = _References(task, timeout)
    if vocab_size is None:
        known = _References(replace(task, vocab_size=known.width()), timeout)
    results = []
    for cell in cells:
        results.append(_run_cell(cell, known, device, settings.bounds, timeout))
        if report is not None:
            report(results[-1])
    return results


def _run_cell(
    cell: Cell, known: _References, device: str, bounds: Mapping[str, float], timeout: float
) -> Result:
    """Train in the layout of a cell, or on the CPU, and compare with its references."""
    of_cell, references = known.of(cell)
    began = time.perf_counter()
    inputs = [*references.values()]
    if cell.on_host:
        function = partial(compare_with_cpu, of_cell, inputs)
    else:
        function = partial(rank_of_cell, of_cell, cell, inputs)

    statuses = run_on_ranks(cell.world, function, timeout, device)
    return _judge(cell, statuses, references, bounds, time.perf_counter() - began)


def _require_no_group() -> None:
    """Raise ProveError in a process that has a process group or is one rank of several."""
    if dist.is_initialized():
        rule = "must not exist where prove is called"
        raise prove_error("process group", "running", ..., rule, "end it first")
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        rule = "must be 1, as prove starts its own ranks"
        fix = "call it without torchrun, with --nproc"
        raise prove_error("WORLD_SIZE", "ranks", size, rule, fix)


def _require_sizes(vocab_size: int, seq_len: int, seed: int, timeout: float) -> None:
    """Raise ProveError for a size that `Task.batch` cannot draw, or a time without meaning."""
    for name, value, least, most in (
        ("vocab_size", vocab_size, 2, 2**31),
        ("seq_len", seq_len, 2, 2**31),
        ("seed", seed, 0, 2**32 - 1),
    ):
        if not least <= value <= most:
            rule = f"must be at least {least} and at most {most}"
            raise prove_error(name, "range", value, rule, "correct it")
    if not 0 < timeout <= 86400:
        rule = "must be above 0 and at most 86400 seconds"
        raise prove_error("timeout", "range", timeout, rule, "leave it out for the default")


def _find_devices(nproc: int | None, timeout: float) -> Devices:
    """GPUs of this machine, read in a child. Raises ProveError if there are fewer than `nproc`: NCCL does not allow two
    ranks on one device."""
    (status,) = run_on_ranks(1, lambda _: proof_settings.find_devices(), timeout)
    if status.kind != "returned":
        rule = f"must have a GPU that torch can use, and asking for it, {status}"
        fix = f"correct the driver, or use cpu\n{status.trace}"
        raise prove_error("device", "requires", "cuda", rule, fix)
    devices: Devices = status.value
    if (nproc or 1) > devices.count:
        rule = f"must be at most the {devices.count} GPUs that this process sees, as NCCL allows one rank per GPU"
        fix = f"use {f'nproc {devices.count}' if devices.count else 'device cpu'}"
        raise prove_error("nproc", "devices", nproc or 1, rule, fix)
    return devices


class _References:
    """References of the cells, each computed once."""

    def __init__(self, task: Task, timeout: float) -> None:
        self._task, self._timeout = task, timeout
        self._known: dict[Any, Reference] = {}

    def width(self) -> int:
        """Width V of the model's logits, from one forward in a child."""
        device = self._task.settings.device
        width: Any = self._run("width", lambda at: (width_of_logits(self._task, at), []), device)
        return int(width)

    def of(self, cell: Cell) -> tuple[Task, dict[str, Reference]]:
        """The task with the batches of this cell, and its references by name: "" is one process in fp32."""
        settings = self._task.settings
        size = cell.global_batch(settings)
        task = replace(self._task, branches=cell.branches, global_batch=size)
        if cell.on_host:
            return task, {ON_CPU: self._one_process(task, "cpu")}
        found = {"": self._one_process(task, settings.device)}

        if settings.precision == "bf16" and cell.rounds_as_one_rank(settings):
            readers = cell.config(settings).axes(cell.world).batch_size
            single = Cell("", 1, micro_batches=readers * cell.micro_batches)
            run = partial(one_rank, task, single, found[""])
            key = cell.branches, size, single.micro_batches
            found[ONE_RANK] = self._run(key, run, settings.device)
        return task, found

    def _one_process(self, task: Task, device: str) -> Reference:
        """The reference of one process in plain PyTorch."""
        known = set(sys.modules)

        def run(where: Any) -> tuple[Reference, list[str]]:
            # with GPUs this process imports no module of the child: one that uses CUDA would end all further forks
            fresh = [] if task.settings.device == "cuda" else sys.modules
            return one_process(task, where), [name for name in fresh if name not in known]

        return self._run((task.branches, task.global_batch, device), run, device)

    def _run(self, key: Any, run: Callable[..., Any], device: str) -> Reference:
        """The reference (or width) of this key, computed in a child. Imports the modules that the child imported."""
        if key in self._known:
            return self._known[key]
        (status,) = run_on_ranks(1, run, self._timeout, device)
        if status.kind == "ProveError":
            raise ProveError(status.problems)
        if status.kind != "returned":
            if "fork-based multiprocessing" in str(status.value):
                rule = "must not have run a backward on a CUDA build of torch, as its forks then cannot run any"
                fix = "prove first, or in a process of its own: python -m forge_parallel.prove"
                raise prove_error("this process", "backward", ..., rule, fix)
            rule = f"must train in one process, and there {status}"
            fix = f"correct build, its args, vocab_size, seq_len or timeout\n{status.trace}"
            raise prove_error("model", "raised", ..., rule, fix)

        value = status.value
        reference, modules = (value, ()) if isinstance(value, Reference) else value
        # here once, not in every rank of every cell: models of transformers took seconds in each
        for module in modules:
            with suppress(Exception):  # made by code, not found by name: ranks make it again
                importlib.import_module(module)
        self._known[key] = reference
        return reference


def _import(name: str) -> Callable[..., Any]:
    """The function of "module:function". Raises ProveError, with the traceback if the module itself raised."""
    try:
        found = pkgutil.resolve_name(name)
        if not callable(found):
            raise ValueError(f"a {type(found).__name__} cannot be called")
        return found
    except (ImportError, AttributeError, ValueError) as error:
        rule = f"cannot be imported ({error}), and must be module:function"
        fix = "run where it can be, as my_lab.model:build"
        raise prove_error("import", "not_found", name, rule, fix) from error
    except (Exception, SystemExit) as error:  # of the module's own code
        rule = f"must be module:function, and importing it raised {type(error).__name__}: {error}"
        fix = f"correct the module\n{traceback.format_exc()}"
        raise prove_error("import", "raised", name, rule, fix) from error


def _judge(
    cell: Cell,
    statuses: list[ExitStatus],
    references: Mapping[str, Reference],
    bounds: Mapping[str, float],
    seconds: float,
) -> Result:
    """The verdict of a cell from the errors on each rank. Raises ProveError if a rank did."""
    result = Result(cell.name, cell.world, "green", seconds=seconds)
    failed = [(s.at, rank, s) for rank, s in enumerate(statuses) if s.kind != "returned"]
    if failed:  # the first error is the cause; the others have lost their connection
        _, rank, first = min(failed)
        if first.kind == "ProveError":
            raise ProveError(first.problems)
        result = replace(result, problems=first.problems)
        if first.kind == "UnsupportedLayout":
            return replace(result, verdict="refused", message=first.value)
        return replace(result, verdict="red", message=f"on rank {rank} {first}", trace=first.trace)

    red: dict[str, Any] = {}
    red_step = STEPS
    for number, (name, reference) in enumerate(references.items()):
        # the largest error of each value over the ranks, in the order of computation
        errors = {key: 0.0 for key in reference.keys}
        compared = set()
        for status in statuses:
            for key, error in status.value[number].items():
                errors[key] = max(error, errors[key])
                quantity = ONE_RANK if name == ONE_RANK else key[1]
                result.errors[quantity] = max(error, result.errors.get(quantity, 0.0))
                compared.add(key[2])

        bound = {key: bounds[name or key[1]] for key in errors}
        if out := [key for key, error in errors.items() if error > bound[key]]:
            red = red or _first_difference(out, errors, bound[out[0]], name)
            red_step = out[0][0]
        elif missing := sorted(reference.start.keys() - compared):
            red = red or {"message": f"no rank holds {missing[0]}", "parameter": missing[0]}
        elif name == ONE_RANK and red_step == 0:
            red["message"] += SAME_IN_ONE_RANK
    return replace(result, verdict="red", **red) if red else result


def _first_difference(
    red: list[ValueKey], errors: dict[ValueKey, float], bound: float, reference: str
) -> dict[str, Any]:
    """Message, parameter and layer of the first value beyond its bound.

    The parameter is the one whose gradient is computed first; if the stream differs already, the first in that layer.
    """
    step, quantity, name = red[0]
    of = f" {'after' if quantity == 'stream' else 'of'} {name}" if name else ""
    origin = {ONE_RANK: " from one rank in bf16", ON_CPU: " from the CPU"}.get(reference, "")
    message = f"{quantity}{of} in step {step + 1} differs first{origin}, by {errors[red[0]]:.1e} (bound {bound:g})"

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
