"""The two sides that are compared: one process in plain PyTorch, and a rank of a layout.

Shapes: B rows, S tokens of a row, D width of the stream, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_parallel._torch_compat import in_backward
from forge_parallel.axes.context import cut_sequence
from forge_parallel.axes.fsdp import reshard
from forge_parallel.axes.hf_plan import has_plan
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_parallel.compute import Compute
from forge_parallel.config import ParallelConfig
from forge_parallel.grad_norm import clip_grads_, global_count, global_grad_norm
from forge_parallel.legal import Facts, problems
from forge_parallel.meshes import make_meshes
from forge_parallel.parallelize import parallelize
from forge_parallel.prove.task import IGNORED, ROWS, Batch, Cell, Task, keywords_of, layers_of
from forge_parallel.structure import Structure, structure_of

STEPS, MAX_NORM = 2, 0.5
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
Tensors = dict[str, Tensor]
ValueKey = tuple[int, str, str]
"""Step, quantity and name of a value."""


class ProveError(ValueError):
    """This model cannot be proved: value, rule, fix."""


class Refused(Exception):
    """forge_parallel refuses this layout for this model."""


class Reference(NamedTuple):
    """Values of one process: weights at the start, and in the order of their computation `values` by step and
    quantity: the stream (B, S, D) behind each layer in the first step, of each step loss, gradients and norm,
    weights at the end."""

    start: Tensors
    values: dict[tuple[int, str], Tensors]

    @property
    def keys(self) -> list[ValueKey]:
        """All values in their order."""
        return [(*when, name) for when, tensors in self.values.items() for name in tensors]


def one_process(task: Task) -> Reference:
    """The truth: the global batch in one forward. ProveError for a model that has no truth."""
    model, again = task.model(), task.model()
    names, start, structure = keywords_of(model), _weights(model), _structure(model, task)
    _require_same_start(again, start, "called twice with the same seed")
    batch = task.batch(0, names)
    with torch.no_grad():
        if not torch.equal(*(_logits(again(batch.tokens, **batch.inputs)) for _ in range(2))):
            raise ProveError(
                "forward must give the same for the same tokens, and gave two results; build the model "
                "without dropout"
            )
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    values: dict[tuple[int, str], Tensors] = {}
    for step in range(STEPS):
        batch = task.batch(step, names)
        with _watching(model, structure) as seen:
            logits = _logits(model(batch.tokens, **batch.inputs))
        if step == 0:
            values[step, "stream"] = {name: parts[0] for name, parts in seen.items()}
        loss = _token_loss(logits, batch.labels) / max(1, batch.num_valid)
        loss.backward()
        values[step, "loss"] = {"": loss.detach()}
        values[step, "gradient"] = _gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        values[step, "norm"] = {"": norm.detach()}
        optimizer.step()
        optimizer.zero_grad()
    values[STEPS - 1, "weight"] = _weights(model)
    if can_generate(model):
        values[STEPS - 1, "text"] = {"": _text(model, task)}
    return Reference(start, values)


def rank_of_cell(task: Task, cell: Cell, reference: Reference) -> dict[ValueKey, float]:
    """The same steps on a rank of a layout: how far each value is off. Refused where the layout is."""
    try:
        run = _LayoutRun(task, cell, reference)
    except ProveError:
        raise
    except ValueError as error:
        raise Refused(str(error)) from error
    model = run.model
    errors: dict[ValueKey, float] = {}

    def compare(step: int, quantity: str, got: Tensors) -> None:
        wanted = reference.values[step, quantity]
        largest = max(float(tensor.abs().max()) for tensor in wanted.values())
        for name, value in got.items():
            errors[step, quantity, name] = _error(value, wanted[name], largest)

    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(STEPS):
        if cell.swaps and step:
            _evaluate_others(model, task.batch(step, run.names))
        with _watching(model, run.structure) as seen:
            share = run.forward_backward(task.batch(step, run.names))
        for name, whole in reference.values.get((step, "stream"), {}).items():
            if name in seen:
                errors[step, "stream", name] = run.stream_error(seen[name], whole)
        norm, sums = global_grad_norm(run.compute.counted, sums=share)
        assert sums is not None
        compare(step, "loss", {"": sums[0]})
        compare(step, "gradient", _gradients(model))
        compare(step, "norm", {"": norm})
        clip_grads_(model.parameters(), norm, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    compare(STEPS - 1, "weight", _weights(model))
    if (STEPS - 1, "text") in reference.values and run.meshes.pp.size == 1:
        compare(STEPS - 1, "text", {"": _text(model, task)})
    return errors


class _LayoutRun:
    """A model in its layout, and the way of a batch through it."""

    def __init__(self, task: Task, cell: Cell, reference: Reference) -> None:
        self.model = task.model()
        self.names = keywords_of(self.model)  # before a step changes its class
        self.structure = _structure(self.model, task)
        _require_same_start(self.model, reference.start, "built on another rank")
        config = ParallelConfig(device="cpu", precision="fp32", **cell.layout)
        if config.cp > 1 and "positions" not in self.names:
            raise Refused(
                f"{type(self.model).__name__} must take positions to have its rows cut; add the parameter to its "
                "forward"
            )
        self.meshes = make_meshes(config)
        batch = Facts(seq_len=task.seq_len, num_micro_batches=cell.micro_batches)
        if found := problems(config, config.axes(self.meshes.world_size), batch):
            raise Refused("\n".join(found))
        self.all_rows = ROWS // self.meshes.batch_size
        self.rows = self.all_rows // cell.micro_batches
        parallelize(
            self.model,
            config,
            self.meshes,
            blocks=task.blocks,
            seq_len=task.seq_len,
            compile_backend="aot_eager",  # our cuts around the graphs are proved, not inductor's kernels
            report=lambda _: None,
        )
        self.compute = Compute(
            self.model,
            config,
            self.meshes,
            micro_batch=self.rows,
            num_micro_batches=cell.micro_batches,
            seq_len=task.seq_len,
            loss=_token_loss,
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
            worst = max(worst, _error(part, right) if part.shape == right.shape else 0.0)
        return worst


def _width_of(reference: Reference) -> int:
    """D of the stream that stages hand on."""
    for stream in reference.values[0, "stream"].values():
        return stream.size(-1)
    raise Refused(
        "pp must have blocks that hand on the stream as one float tensor (B, S, D), and no block does; "
        "pipeline_parts() says which are the blocks"
    )


@contextmanager
def _watching(model: nn.Module, structure: Structure) -> Iterator[dict[str, list[Tensor]]]:
    """Outputs (B, S, D) of each layer inside the `with` block, by name; one for each forward, none for recomputations."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) and output else output
        if isinstance(stream, Tensor) and stream.dim() == 3 and not in_backward():
            seen.setdefault(name, []).append(stream.detach().clone())

    layers = layers_of(model, structure).items()
    hooks = [layer.register_forward_hook(partial(note, name)) for name, layer in layers]
    yield seen
    for hook in hooks:
        hook.remove()


def _error(got: Tensor, wanted: Tensor, largest: float = 0.0) -> float:
    """max|a - b| / max|b|; a tensor below 1e-5 of the `largest` is zero but for rounding (the gradient of a
    bias before a softmax) and is measured by that. Not a number is inf."""
    scale, difference = float(wanted.abs().max()), float((got - wanted).abs().max())
    scale = largest if scale < 1e-5 * largest else scale
    error = 0.0 if difference == 0 else difference / scale if scale else torch.inf
    return error if error == error else torch.inf


def _structure(model: nn.Module, task: Task) -> Structure:
    try:
        return structure_of(model, task.blocks)
    except ValueError as error:
        raise ProveError(str(error)) from error


def _require_same_start(model: nn.Module, start: Tensors, when: str) -> None:
    for name, parameter in model.named_parameters():
        if name not in start or not torch.equal(parameter, start[name]):
            raise ProveError(
                f"build must give the same values each time, and {name} differs {when}; draw from torch's, "
                "random's or numpy's own generators, which are seeded before"
            )


def _logits(output: Any) -> Tensor:
    """(B, S, V), also of a Hugging Face output."""
    found: Tensor = getattr(output, "logits", output)
    return found


def _token_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


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


def can_generate(model: nn.Module) -> bool:
    """Whether it writes text as the models of transformers do."""
    return has_plan(model) and hasattr(model, "generate")


def _text(model: Any, task: Task) -> Tensor:
    """(2, 10) what it writes greedily, not in training mode, behind four tokens of two rows."""
    model.eval()
    prompt = task.batch(0, ()).tokens[:2, :4]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text: Tensor = model.generate(prompt, **options)
    return text.float()


def _weights(model: nn.Module) -> Tensors:
    """Copies, whole, those first that a backward reaches first."""
    return _whole(reversed([*model.named_parameters()]))


def _gradients(model: nn.Module) -> Tensors:
    """In the same order; zero where there is none."""
    named = reversed([*model.named_parameters()])
    return _whole((n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in named)


def _whole(tensors: Iterable[tuple[str, Any]]) -> Tensors:
    """Copies; all of a DTensor. Of what several ranks hold each gets its own."""
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in tensors
    }
