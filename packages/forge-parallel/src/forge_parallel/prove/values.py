"""The reference of a proof: the values that one process computes in plain PyTorch, and the error of another value.

Shapes: B sequences, S tokens of a sequence, D width of the stream, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_parallel._shared.problems import problems_of
from forge_parallel._torch_compat import in_backward
from forge_parallel.axes.roles import has_plan
from forge_parallel.prove.settings import ProveError, prove_error
from forge_parallel.prove.task import IGNORED, Task, keywords_of, layers_of
from forge_parallel.structure import Structure, structure_of

STEPS, MAX_NORM = 2, 0.5
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}

Tensors = dict[str, Tensor]
ValueKey = tuple[int, str, str]
"""Step, quantity and name of a value."""


class Reference(NamedTuple):
    """Values of one process, on the CPU: `start` weights, and `values` by (step, quantity) in the order of computation.

    Per step: the stream (B, S, D) after each layer (outside fp32 of the first step only), loss, gradients, norm; the
    weights of the last step.
    """

    start: Tensors
    values: dict[tuple[int, str], Tensors]

    @property
    def keys(self) -> list[ValueKey]:
        """Keys of all values, in the order of computation."""
        return [(*when, name) for when, tensors in self.values.items() for name in tensors]


@torch.no_grad()
def width_of_logits(task: Task, device: torch.device) -> int:
    """Width V of the logits (B, S, V) of the model. Cost: it is built, and runs one forward."""
    model = task.model()
    batch = task.batch(0, keywords_of(model)).to(device)
    return logits(model.to(device)(batch.tokens, **batch.inputs)).size(-1)


def one_process(task: Task, device: torch.device) -> Reference:
    """Train in one process, the global batch in one forward, in fp32. Raises ProveError for a model that draws random
    numbers or computes values that are not finite."""
    model, again = task.model(), task.model()
    names, start, structure = keywords_of(model), weights(model), structure_of_task(model, task)
    made = {**start, **dict(model.named_buffers())}
    again_made = [*again.named_parameters(), *again.named_buffers()]
    require_same_start(again_made, made, "when it is called twice with the same seed")

    model, again = model.to(device), again.to(device)
    batch = task.batch(0, names).to(device)
    with torch.no_grad():
        twice = (logits(again(batch.tokens, **batch.inputs)).cpu() for _ in range(2))
        if not are_equal(*twice):
            rule = "must give the same for the same tokens, and gave two results"
            fix = "build the model without dropout, other random numbers and counts of its calls"
            raise prove_error("forward", "random", ..., rule, fix)

    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    values: dict[tuple[int, str], Tensors] = {}
    for step in range(STEPS):
        on_host = task.batch(step, names)
        batch = on_host.to(device)
        with record_streams(model, structure) as seen:
            output = logits(model(batch.tokens, **batch.inputs))
        # a layer that uses an old weight shows in the second step; the bounds of 16 bits hold for the first only
        if step == 0 or task.settings.precision == "fp32":
            values[step, "stream"] = {name: parts[0] for name, parts in seen.items()}
        # a step without labels has loss 0, not nan
        loss = token_loss(output, batch.labels) / max(1, on_host.num_valid)
        loss.backward()
        values[step, "loss"] = {"": loss.detach().cpu()}
        values[step, "gradient"] = gradients(model)

        # torch's own norm: Forge's would have the same mistake on both sides
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        values[step, "norm"] = {"": norm.detach().cpu()}
        optimizer.step()
        optimizer.zero_grad()
    values[STEPS - 1, "weight"] = weights(model)
    if task.settings.precision == "fp32" and can_generate(model):
        values[STEPS - 1, "text"] = {"": generate_text(model, task)}

    for (step, quantity), tensors in values.items():
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                of = f" of {name}" if name else ""
                rule = f"must be finite in one process, and its {quantity}{of} in step {step + 1} is nan or infinite there"
                fix = "correct its forward or its initial weights"
                raise prove_error("model", "finite", ..., rule, fix)
    return Reference(start, values)


def compare_with_cpu(
    task: Task, references: Sequence[Reference], device: torch.device
) -> list[dict[ValueKey, float]]:
    """Errors of one process on `device` against each reference. Text is not compared: rounding changes it."""
    found = one_process(task, device).values
    errors: list[dict[ValueKey, float]] = [{} for _ in references]
    for into, reference in zip(errors, references, strict=True):
        for (step, quantity), wanted in reference.values.items():
            if quantity != "text":
                got = found[step, quantity]
                into |= {(step, quantity, n): e for n, e in value_errors(got, wanted).items()}
    return errors


def value_errors(got: Tensors, wanted: Tensors, min_scale: float = 0.0) -> dict[str, float]:
    """Errors by name of the values of one quantity that both sides have."""
    largest = max((float(tensor.abs().max()) for tensor in wanted.values()), default=0.0)
    names = got.keys() & wanted.keys()
    return {name: error(got[name], wanted[name], largest, min_scale) for name in names}


def error(got: Tensor, wanted: Tensor, largest: float = 0.0, min_scale: float = 0.0) -> float:
    """Return max|got - wanted| / max|wanted|; inf instead of nan.

    A tensor below 1e-5 of the `largest` one is zero but for rounding (the gradient of a bias before a softmax) and is
    measured by the largest; others by at least `min_scale` of it.
    """
    scale, difference = float(wanted.abs().max()), float((got - wanted).abs().max())
    scale = largest if scale < 1e-5 * largest else max(scale, min_scale * largest)
    error = 0.0 if difference == 0 else difference / scale if scale else torch.inf
    return error if error == error else torch.inf


@contextmanager
def record_streams(model: nn.Module, structure: Structure) -> Iterator[dict[str, list[Tensor]]]:
    """Record the output (B, S, D) of each layer inside the `with` block, by name, on the CPU in fp32: one tensor per
    forward, without recomputations."""
    seen: dict[str, list[Tensor]] = {}

    def record(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) and output else output
        if isinstance(stream, Tensor) and stream.dim() == 3 and not in_backward():
            seen.setdefault(name, []).append(stream.detach().to("cpu", copy=True).float())

    layers = layers_of(model, structure).items()
    hooks = [layer.register_forward_hook(partial(record, name)) for name, layer in layers]
    yield seen
    for hook in hooks:
        hook.remove()


def logits(output: Any) -> Tensor:
    """Return the logits (B, S, V) of an output, which may be a Hugging Face one. Raises ProveError for anything else."""
    found = getattr(output, "logits", output)
    if not (isinstance(found, Tensor) and found.dim() == 3):
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        rule = "must be logits (B, S, V), or something with .logits, as the result of forward"
        raise prove_error("forward", "logits", given, rule, "wrap the model")
    return found


def token_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of the cross-entropy over all labels that are not IGNORED; logits (B, S, V), labels (B, S).

    `weights` is what `LossFunction` passes: None here, as batches of a proof have none.
    """
    flat = logits.flatten(0, 1).float()  # (B S, V)
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def can_generate(model: nn.Module) -> bool:
    """Whether the model generates text as the models of transformers do."""
    return has_plan(model) and hasattr(model, "generate")


def generate_text(model: Any, task: Task) -> Tensor:
    """Token ids (2, 10) of greedy generation in eval mode from four tokens of two sequences. Leaves eval mode on."""
    model.eval()
    prompt = task.batch(0, ()).tokens[:2, :4].to(next(model.parameters()).device)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text: Tensor = model.generate(prompt, **options)
    return text.to("cpu", torch.float32)


def weights(model: nn.Module) -> Tensors:
    """Full weights on the CPU, last layer first: the order in which a backward reaches them."""
    return _full_on_host(reversed([*model.named_parameters()]))


def gradients(model: nn.Module) -> Tensors:
    """Full gradients on the CPU, in the order of `weights`; zeros for a parameter without one."""
    named = reversed([*model.named_parameters()])
    return _full_on_host((n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in named)


def _full_on_host(tensors: Iterable[tuple[str, Any]]) -> Tensors:
    """CPU copies by name; a DTensor is gathered, and of a replicated tensor each rank keeps its own values."""
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().to("cpu", copy=True)
        for name, t in tensors
    }


def structure_of_task(model: nn.Module, task: Task) -> Structure:
    """Blocks of the model; ProveError instead of ValueError if it has none of these names."""
    try:
        return structure_of(model, task.blocks)
    except ValueError as error:
        raise ProveError(problems_of(error)) from error


def require_same_start(named: Iterable[tuple[str, Tensor]], start: Tensors, when: str) -> None:
    """Raise ProveError if a tensor of a newly built model differs from the one in `start`."""
    for name, tensor in named:
        if name not in start or not are_equal(tensor, start[name]):
            rule = f"must give the same values each time, and {name} differs {when}"
            fix = "draw from torch's, random's or numpy's own generators, which are seeded before"
            raise prove_error("build", "random", ..., rule, fix)


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values, and nan at the same places: uninitialized memory may be nan in both."""
    # not nan_to_num, for which nan is 0 and inf is the largest number (F223)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0)
    )
