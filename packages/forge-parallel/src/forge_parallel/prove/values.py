"""The values that are compared, and by how much two of them differ.

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

from forge_parallel._shared.problems import invalid
from forge_parallel._torch_compat import in_backward
from forge_parallel.axes.hf_plan import has_plan
from forge_parallel.prove.settings import ProveError
from forge_parallel.prove.task import IGNORED, Task, layers_of
from forge_parallel.structure import Structure

Tensors = dict[str, Tensor]
ValueKey = tuple[int, str, str]
"""Step, quantity and name of a value."""


class Reference(NamedTuple):
    """Values of one process: weights at the start, and in the order of their computation `values` by step and
    quantity: the stream (B, S, D) behind each layer (but in fp32 of the first step only), of each step loss, gradients and norm,
    weights at the end. All on the host."""

    start: Tensors
    values: dict[tuple[int, str], Tensors]

    @property
    def keys(self) -> list[ValueKey]:
        """All values in their order."""
        return [(*when, name) for when, tensors in self.values.items() for name in tensors]


@contextmanager
def watching(model: nn.Module, structure: Structure) -> Iterator[dict[str, list[Tensor]]]:
    """Outputs (B, S, D) of each layer inside the `with` block, by name, on the host in fp32; one for each forward, none
    for recomputations."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) and output else output
        if isinstance(stream, Tensor) and stream.dim() == 3 and not in_backward():
            seen.setdefault(name, []).append(stream.detach().to("cpu", copy=True).float())

    layers = layers_of(model, structure).items()
    hooks = [layer.register_forward_hook(partial(note, name)) for name, layer in layers]
    yield seen
    for hook in hooks:
        hook.remove()


def error(got: Tensor, wanted: Tensor, largest: float = 0.0, small: float = 0.0) -> float:
    """max|a - b| / max|b|; a tensor below 1e-5 of the `largest` is zero but for rounding (the gradient of a
    bias before a softmax) and is measured by that, others at least by `small` of it. Not a number is inf."""
    scale, difference = float(wanted.abs().max()), float((got - wanted).abs().max())
    scale = largest if scale < 1e-5 * largest else max(scale, small * largest)
    error = 0.0 if difference == 0 else difference / scale if scale else torch.inf
    return error if error == error else torch.inf


def logits(output: Any) -> Tensor:
    """(B, S, V), also of a Hugging Face output. ProveError for anything else."""
    found = getattr(output, "logits", output)
    if not (isinstance(found, Tensor) and found.dim() == 3):
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        rule = "must be logits (B, S, V), or something with .logits, as the result of forward"
        raise invalid("forward", "logits", what, rule, "wrap the model", kind=ProveError)
    return found


def token_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def can_generate(model: nn.Module) -> bool:
    """Whether it writes text as the models of transformers do."""
    return has_plan(model) and hasattr(model, "generate")


def text(model: Any, task: Task) -> Tensor:
    """(2, 10) what it writes greedily, not in training mode, behind four tokens of two rows."""
    model.eval()
    prompt = task.batch(0, ()).tokens[:2, :4].to(next(model.parameters()).device)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text: Tensor = model.generate(prompt, **options)
    return text.to("cpu", torch.float32)


def weights(model: nn.Module) -> Tensors:
    """Copies, whole, those first that a backward reaches first."""
    return whole_on_host(reversed([*model.named_parameters()]))


def gradients(model: nn.Module) -> Tensors:
    """In the same order; zero where there is none."""
    named = reversed([*model.named_parameters()])
    return whole_on_host((n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in named)


def whole_on_host(tensors: Iterable[tuple[str, Any]]) -> Tensors:
    """Copies; all of a DTensor. Of what several ranks hold each gets its own."""
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().to("cpu", copy=True)
        for name, t in tensors
    }
