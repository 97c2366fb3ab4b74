"""The two sides that are compared: one process in plain PyTorch, and a rank of a layout.

Shapes: B rows, S tokens of a row, D width of the stream, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge_parallel._shared.problems import WithProblems, invalid, problems_of, raise_problems
from forge_parallel.axes.context import cut_sequence
from forge_parallel.axes.fsdp import reshard
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_parallel.compute import Compute
from forge_parallel.grad_norm import clip_grads_, global_count, global_grad_norm
from forge_parallel.legal import Facts, problems
from forge_parallel.meshes import make_meshes
from forge_parallel.parallelize import parallelize
from forge_parallel.prove.cells import Cell
from forge_parallel.prove.settings import ProveError, allow_tf32
from forge_parallel.prove.task import Batch, Task, keywords_of
from forge_parallel.prove.values import (
    Reference,
    Tensors,
    ValueKey,
    can_generate,
    error,
    gradients,
    logits,
    text,
    token_loss,
    watching,
    weights,
)
from forge_parallel.sdpa import sdpa_kernel, sdpa_problem
from forge_parallel.structure import Structure, structure_of

STEPS, MAX_NORM = 2, 0.5
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


class Refused(WithProblems):
    """forge_parallel refuses this layout for this model."""


def one_process(task: Task, device: torch.device) -> Reference:
    """The truth: the global batch in one forward, in fp32. ProveError for a model that has no truth."""
    model, again = task.model(), task.model()
    names, start, structure = keywords_of(model), weights(model), _structure(model, task)
    made = {**start, **dict(model.named_buffers())}
    again_made = [*again.named_parameters(), *again.named_buffers()]
    _require_same_start(again_made, made, "when it is called twice with the same seed")
    model, again = model.to(device), again.to(device)
    batch = task.batch(0, names).to(device)
    with torch.no_grad():
        twice = (logits(again(batch.tokens, **batch.inputs)).cpu() for _ in range(2))
        if not _same(*twice):
            rule = "must give the same for the same tokens, and gave two results"
            fix = "build the model without dropout, other random numbers and counts of its calls"
            raise invalid("forward", "random", ..., rule, fix, kind=ProveError)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    values: dict[tuple[int, str], Tensors] = {}
    for step in range(STEPS):
        on_host = task.batch(step, names)
        batch = on_host.to(device)
        with watching(model, structure) as seen:
            output = logits(model(batch.tokens, **batch.inputs))
        # a layer that uses an old weight shows in the second step; the bounds of 16 bits are of the first
        if step == 0 or task.settings.precision == "fp32":
            values[step, "stream"] = {name: parts[0] for name, parts in seen.items()}
        loss = token_loss(output, batch.labels) / max(1, on_host.num_valid)
        loss.backward()
        values[step, "loss"] = {"": loss.detach().cpu()}
        values[step, "gradient"] = gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        values[step, "norm"] = {"": norm.detach().cpu()}
        optimizer.step()
        optimizer.zero_grad()
    values[STEPS - 1, "weight"] = weights(model)
    if can_generate(model) and task.settings.precision == "fp32":
        values[STEPS - 1, "text"] = {"": text(model, task)}
    for (step, quantity), tensors in values.items():
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                of = f" of {name}" if name else ""
                rule = f"must be finite in one process, and its {quantity}{of} in step {step + 1} is nan or infinite there"
                fix = "correct its forward or its initial weights"
                raise invalid("model", "finite", ..., rule, fix, kind=ProveError)
    return Reference(start, values)


def beside_the_cpu(
    task: Task, references: Sequence[Reference], device: torch.device
) -> list[dict[ValueKey, float]]:
    """How far each value of one process on `device` is off. A text is not compared: rounding differs."""
    found = one_process(task, device)
    return [
        {
            key: error(
                found.values[key[:2]][key[2]],
                wanted.values[key[:2]][key[2]],
                _largest(wanted.values[key[:2]]),
            )
            for key in wanted.keys
            if key[1] != "text"
        }
        for wanted in references
    ]


def rank_of_cell(
    task: Task, cell: Cell, references: Sequence[Reference], device: torch.device
) -> list[dict[ValueKey, float]]:
    """The same steps on a rank of a layout: how far each value is off, from each reference. Refused where the layout
    is."""
    errors: list[dict[ValueKey, float]] = [{} for _ in references]

    def compare(run: _LayoutRun, step: int, quantity: str, got: dict[str, Any]) -> None:
        start = references[0].start
        changed = quantity == "weight" and task.settings.precision != "fp32"
        if changed:
            got = {**_changes(got, start)}
        for found, reference in zip(errors, references, strict=True):
            wanted = reference.values.get((step, quantity), {})
            wanted = _changes(wanted, start) if changed else wanted
            largest = _largest(wanted)
            for name in got.keys() & wanted.keys():
                value = got[name]
                found[step, quantity, name] = (
                    run.stream_error(value, wanted[name])
                    if quantity == "stream"
                    else error(value, wanted[name], largest, task.settings.small)
                )

    _train(task, cell, references[0], device, compare)
    return errors


def one_rank(task: Task, cell: Cell, reference: Reference, device: torch.device) -> Reference:
    """The values of a cell of one rank in the first step, a truth for layouts whose ranks round as it does.

    Later its weights differ in their last fp32 bit, and some of these round to another number of 16 bits.
    """
    values: dict[tuple[int, str], Tensors] = {}

    def keep(run: _LayoutRun, step: int, quantity: str, got: dict[str, Any]) -> None:
        if quantity == "stream":
            got = {name: torch.cat(parts) for name, parts in got.items()}
        if step == 0:
            values[step, quantity] = got

    _train(task, cell, reference, device, keep)
    return Reference(reference.start, values)


def _largest(wanted: Tensors) -> float:
    return max((float(tensor.abs().max()) for tensor in wanted.values()), default=0.0)


def _changes(weights: Tensors, start: Tensors) -> Tensors:
    """Of the weights: a bound for 16 bits is so wide that a step that was never made would pass it."""
    return {name: weight - start[name] for name, weight in weights.items()}


def _train(
    task: Task,
    cell: Cell,
    reference: Reference,
    device: torch.device,
    see: Callable[[_LayoutRun, int, str, dict[str, Any]], None],
) -> None:
    """The steps of a rank; `see` gets each quantity: tensors by name, of the stream lists of micro-batches."""
    allow_tf32(task.settings.precision == "tf32")
    try:
        run = _LayoutRun(task, cell, reference, device)
    except ProveError:
        raise
    except ValueError as broken:
        raise Refused(problems_of(broken)) from broken
    model = run.model
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sdpa_kernel(run.config.sdpa):
        for step in range(STEPS):
            if cell.swaps and step:
                _evaluate_others(model, task.batch(step, run.names).to(device))
            with watching(model, run.structure) as seen:
                share = run.forward_backward(task.batch(step, run.names))
            see(run, step, "stream", seen)
            norm, sums = global_grad_norm(run.compute.counted, sums=share)
            assert sums is not None
            see(run, step, "loss", {"": sums[0].cpu()})
            see(run, step, "gradient", gradients(model))
            see(run, step, "norm", {"": norm.cpu()})
            clip_grads_(model.parameters(), norm, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        see(run, STEPS - 1, "weight", weights(model))
        if (STEPS - 1, "text") in reference.values and run.meshes.pp.size == 1:
            see(run, STEPS - 1, "text", {"": text(model, task)})


class _LayoutRun:
    """A model in its layout, and the way of a batch through it."""

    def __init__(self, task: Task, cell: Cell, reference: Reference, device: torch.device) -> None:
        self.model = task.model()
        self.names = keywords_of(self.model)  # before a step changes its class
        self.structure = _structure(self.model, task)
        named = self.model.named_parameters()
        _require_same_start(named, reference.start, "on another rank")
        self.config = config = cell.config(task.settings)
        if wrong := sdpa_problem(config.sdpa, device, config.precision):
            raise Refused([wrong])
        if config.cp > 1 and "positions" not in self.names:
            rule = f"must be an argument of the forward of {type(self.model).__name__} to split its rows"
            raise invalid("positions", "missing", ..., rule, "add the parameter", kind=Refused)
        self.meshes = make_meshes(config, device)
        batch = Facts(seq_len=task.seq_len, num_micro_batches=cell.micro_batches)
        layout = config.axes(self.meshes.world_size)
        raise_problems("", problems(config, layout, batch), Refused)
        self.all_rows = task.rows // self.meshes.batch_size
        self.rows = self.all_rows // cell.micro_batches
        parallelize(
            self.model,
            config,
            self.meshes,
            blocks=task.blocks,
            seq_len=task.seq_len,
            compile_backend=task.settings.compile_backend,
            report=lambda _: None,
        )
        self.compute = Compute(
            self.model,
            config,
            self.meshes,
            micro_batch=self.rows,
            num_micro_batches=cell.micro_batches,
            seq_len=task.seq_len,
            loss=token_loss,
            sharded_loss=lambda logits, labels, _: (
                vocab_cross_entropy(logits, labels, self.meshes.tp).sum
            ),
            keywords=[n for n in ("positions", "document_ids") if n in self.names],
            dim=_width_of(reference) if config.pp > 1 else None,
        )

    def forward_backward(self, batch: Batch) -> Tensor:
        """This rank's share of the loss; gradients of the whole step are in place."""
        rows = batch.map(self._rows)
        count = float(global_count(rows.num_valid, self.meshes))
        return self.compute.gradients(rows, lambda: count)

    def _rows(self, x: Tensor) -> Tensor:
        """Those of all micro-batches of this rank."""
        first = self.meshes.batch_rank * self.all_rows
        return x[first : first + self.all_rows]

    def _tokens(self, rows: Tensor) -> Tensor:
        return cut_sequence(rows, self.meshes.cp)

    def stream_error(self, parts: list[Tensor], whole: Tensor) -> float:
        """Of a layer's outputs in the micro-batches; 0 if their shapes do not determine it."""
        tp, worst = self.meshes.tp, 0.0
        for part, right in zip(parts, self._tokens(self._rows(whole)).split(self.rows)):
            if part.size(1) * tp.size == right.size(1):
                right = right.chunk(tp.size, 1)[tp.rank]
            worst = max(worst, error(part, right) if part.shape == right.shape else 0.0)
        return worst


def _width_of(reference: Reference) -> int:
    """D of the stream that stages hand on."""
    for stream in reference.values[0, "stream"].values():
        return stream.size(-1)
    rule = "must have blocks that hand on one float tensor (B, S, D), and no block does"
    fix = "pipeline_parts() says which are the blocks"
    raise invalid("pp", "stream", ..., rule, fix, kind=Refused)


def _structure(model: nn.Module, task: Task) -> Structure:
    try:
        return structure_of(model, task.blocks)
    except ValueError as error:
        raise ProveError(problems_of(error)) from error


def _same(a: Tensor, b: Tensor) -> bool:
    """Also where both are nan, as memory is that nobody wrote."""
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _require_same_start(named: Iterable[tuple[str, Tensor]], start: Tensors, when: str) -> None:
    for name, tensor in named:
        if name not in start or not _same(tensor, start[name]):
            rule = f"must give the same values each time, and {name} differs {when}"
            fix = "draw from torch's, random's or numpy's own generators, which are seeded before"
            raise invalid("build", "random", ..., rule, fix, kind=ProveError)


@torch.no_grad()
def _evaluate_others(model: nn.Module, batch: Batch) -> None:
    """A forward with other weights, put in and taken out in place as an average of them would be."""
    # held, as an optimizer does: a forward shows others in their place
    parameters = list(model.parameters())
    own = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.mul_(2.0)
    model(batch.tokens, **batch.inputs)
    reshard(model)
    for parameter, value in zip(parameters, own, strict=True):
        parameter.copy_(value)
