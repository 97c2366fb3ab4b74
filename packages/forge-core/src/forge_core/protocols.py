"""Methods and attributes of your own modules and optimizers that forge_core calls; there is nothing to subclass.

What a module may define besides its forward is in `ModuleInit`, `ModuleCost`, `ModuleSharding`, `ModuleInputs`,
`ModuleForward` and `ModuleImages`, one for each subject, in all packages alike. `check_names` finds misspelled names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from forge_core._renamed import renamed
from forge_core._shared.module_protocols import (
    ModuleCost,
    ModuleForward,
    ModuleImages,
    ModuleInit,
    ModuleInputs,
    ModuleSharding,
    check_names,
)

if TYPE_CHECKING:
    from forge_core.model.context import TokenContext
    from forge_core.model.kv_cache import LayerCache

__all__ = [
    "AveragingOptimizer",
    "FeedForwardLike",
    "MixerLike",
    "ModuleCost",
    "ModuleForward",
    "ModuleImages",
    "ModuleInit",
    "ModuleInputs",
    "ModuleSharding",
    "NamedStateOptimizer",
    "OptimizerLike",
    "ScheduleLike",
    "check_names",
]


class MixerLike(Protocol):
    """A token mixer (attention, a state-space layer): the first sublayer of a block."""

    def __call__(self, x: Tensor, ctx: TokenContext, cache: LayerCache | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D). A token may see tokens of its own document, at and before it."""
        ...


class FeedForwardLike(Protocol):
    """The second sublayer of a block: a dense feed-forward, or a mixture of experts."""

    def __call__(self, x: Tensor, ctx: TokenContext) -> Tensor:
        """(B, S, D) -> (B, S, D), every token by itself."""
        ...


class OptimizerLike(Protocol):
    """An optimizer that `build_optimizer` accepts from a builder; torch's optimizers need no `set_lr`."""

    def step(self) -> Any:
        """Update. One that takes `skip`, a 0-dim flag on the device, masks the whole update without a host sync."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All state, as plain data and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        ...


class NamedStateOptimizer(OptimizerLike, Protocol):
    """Optional: state by parameter name, which a checkpoint can load on any layout of ranks."""

    def named_state(self) -> dict[str, dict[str, Tensor | float]]:
        """{parameter name: {slot: tensor or number}}, complete before the first step."""
        ...

    def load_named_state(self, state: dict[str, dict[str, Tensor | float]]) -> None:
        """Restore it."""
        ...


class AveragingOptimizer(OptimizerLike, Protocol):
    """Optional: the optimizer trains one set of weights, and evaluates and saves another, such as an average.

    Named state belongs to the second set: it is read and loaded between `eval()` and `train()`.
    """

    def eval(self) -> None:
        """Put the weights to evaluate and to save into the parameters; do nothing if they are there."""
        ...

    def train(self) -> None:
        """Put the weights to train into the parameters, and keep the others to evaluate."""
        ...


class ScheduleLike(Protocol):
    """A learning-rate schedule, as `build_schedule` returns it."""

    def __call__(self, step: int, /) -> float:
        """Return the factor of the peak learning rate in `step`, counted from 1."""
        ...


__getattr__ = renamed(__name__)
