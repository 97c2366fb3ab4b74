"""Methods and attributes of your own modules and optimizers that forge_core calls; there is nothing to subclass.

Optional methods are looked up by name (`getattr`), so a wrapper that forwards attributes has them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from forge_core._shared.parameter_kinds import ParameterKind

if TYPE_CHECKING:
    from forge_core.model.context import TokenContext
    from forge_core.model.kv_cache import LayerCache

__all__ = [
    "AveragingOptimizer",
    "CountsFlops",
    "DeclaresInit",
    "DeclaresKinds",
    "DeclaresRoles",
    "FeedForwardLike",
    "MixerLike",
    "NamedStateOptimizer",
    "OptimizerLike",
    "PreparesContext",
    "ScalesRates",
    "ScheduleLike",
    "ShowsAttention",
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


class DeclaresInit(Protocol):
    """Optional for any module: initial values of the parameters and buffers below it."""

    def init_table(self, std: float, residual_std: float) -> Mapping[str, tuple[str, float]]:
        """{local name: (kind, value)}, see `Init`; an outer module wins over an inner one."""
        ...


@runtime_checkable
class DeclaresKinds(Protocol):
    """Optional for any module: kinds of the parameters that it holds itself; see `forge_core.kinds`."""

    def parameter_kinds(self) -> Mapping[str, ParameterKind]:
        """{name: "matrix", "vector", "norm", "bias", "embedding", "tensor" or "stacked_" and one of the first five}.

        A parameter that is not in it has a kind by its module, or by its name and dims.
        """
        ...


class DeclaresRoles(Protocol):
    """Optional for any module: how tensor parallelism may shard it."""

    def parallel_roles(self) -> Mapping[str, Any]:
        """{pattern of local names: role, or {"role": role, "multiple_of": width}}; roles are in `Transformer`.

        A module without the method is "opaque": replicated, and given all tokens.
        """
        ...


class CountsFlops(Protocol):
    """Optional for any module: its floating-point operations, where they are not those of linear layers."""

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one forward for one token in sequences of `seq_len`, everything inside included."""
        ...


class ScalesRates(Protocol):
    """Optional for a model: factors of learning rates by its parametrization, times the factors of groups."""

    def lr_scales(self) -> Mapping[str, float]:
        """{parameter name: factor}, for optimizers whose update has the size of the learning rate; others raise."""
        ...


class PreparesContext(Protocol):
    """Optional for a mixer, a feed-forward or a block: derive from the context what all layers share."""

    def prepare(self, ctx: TokenContext, x: Tensor, cache: LayerCache | None = None) -> object:
        """Called once per forward and layer, before the first block; store results with `ctx.once(key, make)`."""
        ...


class ShowsAttention(Protocol):
    """Optional for a module: its attention probabilities for `forge_core.interp`, if it is no `attend` of `Attention`."""

    def attention_weights(self, x: Tensor, ctx: TokenContext, cache: Any = None) -> Tensor:
        """Probabilities (B, H, S, T); called after forward, with its arguments."""
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
