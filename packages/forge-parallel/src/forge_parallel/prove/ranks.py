"""A rank of a layout: the model and the steps of the reference, computed as `parallelize` and `Compute` do it.

Shapes: B sequences, S tokens of a sequence, D width of the stream, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge_parallel._shared.problems import WithProblems, invalid, problems_of, raise_problems
from forge_parallel.axes.context import shard_sequence
from forge_parallel.axes.fsdp import reshard
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_parallel.compute import Compute
from forge_parallel.grad_norm import clip_grads_, global_count, global_grad_norm
from forge_parallel.meshes import make_meshes, sdpa_kernel
from forge_parallel.parallelize import parallelize
from forge_parallel.prove import values
from forge_parallel.prove.cells import Cell
from forge_parallel.prove.settings import ProveError, allow_tf32
from forge_parallel.prove.task import Batch, Task, keywords_of
from forge_parallel.prove.values import MAX_NORM, SGD, STEPS, Reference, Tensors, ValueKey
from forge_parallel.rules import ModelFacts, problems, sdpa_problem


class UnsupportedLayout(WithProblems):
    """forge_parallel does not support this layout of this model."""


def rank_of_cell(
    task: Task, cell: Cell, references: Sequence[Reference], device: torch.device
) -> list[dict[ValueKey, float]]:
    """Train on one rank of a layout and return the errors of its values against each reference.

    Raises UnsupportedLayout for a layout that is not supported for this model.
    """
    errors: list[dict[ValueKey, float]] = [{} for _ in references]
    start = references[0].start

    def compare(run: _LayoutRun, step: int, quantity: str, got: dict[str, Any]) -> None:
        for into, reference in zip(errors, references, strict=True):
            wanted = reference.values.get((step, quantity), {})
            if quantity == "stream":
                names = got.keys() & wanted.keys()
                found = {name: run.stream_error(got[name], wanted[name]) for name in names}
            elif quantity == "weight" and task.settings.precision != "fp32":
                # a bound for 16 bits is so wide that weights without any update would pass it: compare updates
                both = _subtract(got, start), _subtract(wanted, start)
                found = values.value_errors(*both, task.settings.min_scale)
            else:
                found = values.value_errors(got, wanted, task.settings.min_scale)
            into |= {(step, quantity, name): error for name, error in found.items()}

    _train(task, cell, references[0], device, compare)
    return errors


def one_rank(task: Task, cell: Cell, reference: Reference, device: torch.device) -> Reference:
    """Values of one rank in the first step: the reference for layouts whose ranks round as one rank does.

    Later its weights differ in their last fp32 bit, and some of these round to another bf16 number.
    """
    kept: dict[tuple[int, str], Tensors] = {}

    def keep(run: _LayoutRun, step: int, quantity: str, got: dict[str, Any]) -> None:
        if quantity == "stream":
            # one rank has all micro-batches: (B, S, D)
            got = {name: torch.cat(parts) for name, parts in got.items()}
        if step == 0:
            kept[step, quantity] = got

    _train(task, cell, reference, device, keep)
    return Reference(reference.start, kept)


def _subtract(weights: Tensors, start: Tensors) -> Tensors:
    """Updates since the start, by name."""
    return {name: weight - start[name] for name, weight in weights.items()}


def _train(
    task: Task,
    cell: Cell,
    reference: Reference,
    device: torch.device,
    see: Callable[[_LayoutRun, int, str, dict[str, Any]], None],
) -> None:
    """Run the steps of a rank. `see(run, step, quantity, values)` gets tensors by name; for the stream, a list of the
    micro-batches' tensors by name."""
    # in the layout only: the reference keeps fp32
    allow_tf32(task.settings.precision == "tf32")
    try:
        run = _LayoutRun(task, cell, reference, device)
    except ProveError:
        raise
    except ValueError as broken:
        raise UnsupportedLayout(problems_of(broken)) from broken

    model = run.model
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with sdpa_kernel(run.config.sdpa):
        for step in range(STEPS):
            if cell.swaps and step:
                _evaluate_other_weights(model, task.batch(step, run.names).to(device))
            with values.record_streams(model, run.structure) as seen:
                loss = run.forward_backward(task.batch(step, run.names))
            see(run, step, "stream", seen)

            norm, sums = global_grad_norm(run.compute.counted, sums=loss)
            assert sums is not None
            see(run, step, "loss", {"": sums[0].cpu()})
            see(run, step, "gradient", values.gradients(model))
            see(run, step, "norm", {"": norm.cpu()})
            clip_grads_(model.parameters(), norm, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        see(run, STEPS - 1, "weight", values.weights(model))
        if (STEPS - 1, "text") in reference.values and run.meshes.pp.size == 1:
            see(run, STEPS - 1, "text", {"": values.generate_text(model, task)})


class _LayoutRun:
    """A model in its layout, with its `Compute`."""

    def __init__(self, task: Task, cell: Cell, reference: Reference, device: torch.device) -> None:
        self.model = task.model()
        self.names = keywords_of(self.model)
        self.structure = values.structure_of_task(self.model, task)
        named = self.model.named_parameters()
        values.require_same_start(named, reference.start, "on another rank")

        self.config = config = cell.config(task.settings)
        if wrong := sdpa_problem(config.sdpa, device, config.precision):
            raise UnsupportedLayout([wrong])
        if config.ep > 1:
            rule = "needs experts that are sharded before parallelize, which no factory of a model does here"
            fix = "compare losses of your job with ep = 1 and with ep"
            raise invalid("ep", "unsupported", config.ep, rule, fix, kind=UnsupportedLayout)

        if config.cp > 1 and "positions" not in self.names:
            rule = f"must be an argument of the forward of {type(self.model).__name__} to split its sequences"
            raise invalid(
                "positions", "missing", ..., rule, "add the parameter", kind=UnsupportedLayout
            )
        self.meshes = make_meshes(config, device)
        facts = ModelFacts(seq_len=task.seq_len, num_micro_batches=cell.micro_batches)
        layout = config.axes(self.meshes.world_size)
        raise_problems("", problems(config, layout, facts), UnsupportedLayout)

        self.rank_batch = task.global_batch // self.meshes.batch_size
        self.micro_batch = self.rank_batch // cell.micro_batches
        parallelize(
            self.model,
            config,
            self.meshes,
            blocks=task.blocks,
            seq_len=task.seq_len,
            compile_backend=task.settings.compile_backend,
            report=lambda _: None,
        )
        # the reference's own token loss, so that a wrong loss of Forge would show
        self.compute = Compute(
            self.model,
            config,
            self.meshes,
            micro_batch=self.micro_batch,
            num_micro_batches=cell.micro_batches,
            seq_len=task.seq_len,
            loss=values.token_loss,
            sharded_loss=lambda logits, labels, _: (
                vocab_cross_entropy(logits, labels, self.meshes.tp).sum
            ),
            keywords=[n for n in ("positions", "document_ids") if n in self.names],
            dim=_width_of(reference) if config.pp > 1 else None,
        )

    def forward_backward(self, batch: Batch) -> Tensor:
        """Return this rank's part of the loss; the gradients of the step are complete afterwards."""
        own = batch.map(self._rank_part)
        count = float(global_count(own.num_valid, self.meshes))
        return self.compute.gradients(own, lambda: count)

    def _rank_part(self, x: Tensor) -> Tensor:
        """Sequences of this data rank, of all its micro-batches: (B / data ranks, ...) of (B, ...)."""
        first = self.meshes.batch_rank * self.rank_batch
        return x[first : first + self.rank_batch]

    def stream_error(self, parts: list[Tensor], full: Tensor) -> float:
        """Largest error of a layer's outputs, one per micro-batch; 0 if their shapes do not show the sharded dim."""
        tp, worst = self.meshes.tp, 0.0
        wanted = shard_sequence(self._rank_part(full), self.meshes.cp).split(self.micro_batch)
        for part, right in zip(parts, wanted):
            if part.size(1) * tp.size == right.size(1):
                right = right.chunk(tp.size, 1)[tp.rank]  # (B, S / tp, D): sequence parallel
            if part.shape == right.shape:
                worst = max(worst, values.error(part, right))
        return worst


def _width_of(reference: Reference) -> int:
    """Width D of the stream that pipeline stages send."""
    for stream in reference.values[0, "stream"].values():
        return stream.size(-1)
    rule = "must have blocks that hand on one float tensor (B, S, D), and no block does"
    fix = "pipeline_parts() says which are the blocks"
    raise invalid("pp", "stream", ..., rule, fix, kind=UnsupportedLayout)


@torch.no_grad()
def _evaluate_other_weights(model: nn.Module, batch: Batch) -> None:
    """Run a forward with other weights, written and restored in place as an average of weights would be."""
    # held, as an optimizer holds them: in a forward FSDP shows other tensors under these names
    parameters = list(model.parameters())
    own = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.mul_(2.0)

    model(batch.tokens, **batch.inputs)
    reshard(model)
    for parameter, value in zip(parameters, own, strict=True):
        parameter.copy_(value)
