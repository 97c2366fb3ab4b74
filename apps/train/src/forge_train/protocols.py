"""Methods and attributes of your objects that a configuration names; there is nothing to subclass.

| named by | protocol |
|---|---|
| `model.name` | `ModelBuilder`; the model may offer `Generates` |
| `train.loss` | `TokenLoss` |
| `train.objective` | `ObjectiveFunction`, or `CountsItsBatch` |
| `metrics.sinks.<name>.name` | `SinkBuilder`, which makes a `Sink` |
| `callbacks.<name>.name` | a subclass of `forge_train.Callback`; `KeepsState` if it has state |

A table of options (`model.args`, `train.loss_options`, `train.objective_options`, `options` of a sink) is bound as
keywords before the calls below. Models, optimizers and schedules may offer more to the packages that use them: see
their protocols.
Shapes: B rows, S tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from forge_data import Batch

__all__ = [
    "CountsItsBatch", "Generates", "KeepsState", "ModelBuilder", "ObjectiveFunction", "Row", "Sink",
    "SinkBuilder", "TokenLoss",
]  # fmt: skip

Row = Mapping[str, Any]
"""A row of metrics.jsonl: column -> number, text or None; docs/metrics.md lists them."""


class ModelBuilder(Protocol):
    """Makes the model: `module:function` of `model.name`, or an entry point of forge.models."""

    def __call__(self, *, vocab_size: int) -> nn.Module:
        """A module called as `model(tokens, positions=, document_ids=)`, (B, S) int64 -> logits (B, S, V).

        Called on every rank, with the generators of torch, random and numpy seeded alike.
        """
        ...


class Generates(Protocol):
    """Needed by `sample.max_new_tokens` and `forge-train generate`: a key-value cache."""

    def new_cache(self, max_length: int) -> Any:
        """An empty cache for sequences of up to `max_length` tokens, which the model's forward takes as `cache`."""
        ...


class TokenLoss(Protocol):
    """The loss of logits."""

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None, /) -> Tensor:
        """logits (B, S, V), labels (B, S) int64, -100 for none, weights (B, S) fp32 -> 0-dim sum over the labels."""
        ...


class ObjectiveFunction(Protocol):
    """A step of its own in place of the loss of logits; it calls the model itself."""

    def __call__(self, model: nn.Module, batch: Batch, /) -> dict[str, Tensor]:
        """0-dim sums over a micro-batch by name: the first is trained, the others are columns of metrics."""
        ...


class CountsItsBatch(ObjectiveFunction, Protocol):
    """An objective that is not divided by the number of labels."""

    def count(self, batch: Batch, /) -> float:
        """The number that `batch` adds to the divisor of the sums; known on the host, before the forward."""
        ...


class Sink(Protocol):
    """A place where rows of metrics go. Rank 0 alone has sinks, each on a thread of its own.

    An exception switches the sink off with one line on stderr. A sink that is slow loses rows and delays neither a
    step nor a save; the end of a run waits up to 10 s, once, for all sinks together.
    """

    def write(self, row: Row) -> None:
        """Take a row as in metrics.jsonl; rows come in the order of steps."""
        ...

    def close(self) -> None:
        """Called after the last row."""
        ...


class SinkBuilder(Protocol):
    """Makes a sink."""

    def __call__(self, directory: Path, resume_step: int, /) -> Sink:
        """`directory` is the run's, with its resolved configuration in config.toml; `resume_step` is 0 for a new run.

        After a kill the sink gets the rows after `resume_step` again: dropping the old ones is its own task. After
        a rollback the sink is closed and made again in the same process.
        """
        ...


class KeepsState(Protocol):
    """Optional for a callback: state that checkpoints hold. Plain values are those of rank 0."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        ...
