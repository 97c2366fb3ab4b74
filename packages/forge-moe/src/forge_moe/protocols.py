"""Protocols of the objects that a user may pass to forge_moe.

| given as | protocol | built in |
|---|---|---|
| `moe.dispatcher`; `dispatcher` by name (entry points of `forge.dispatchers`) | `Dispatcher`, or `OverlappingDispatcher` | `LocalDispatch`, `AllToAllDispatch`, `HierarchicalDispatch` |
| `backend` by name (entry points of `forge.gemm_backends`) | a `forge_moe.grouped_mm.GemmBackend` | the backends in `forge_moe.grouped_mm` |
| fields of a `RoutingRule` (entry points of `forge.routers`) | `Score`, `Choose`, `Weigh` | the rules in `forge_moe.router` |
| `ctx` of `MoE.forward` | `TokenContext`, `CachingContext` | none; for example a SimpleNamespace |
| `dense` of `upcycle` | `DenseFeedForward` | none; for example a feed-forward of Llama or Qwen |

Shapes: B sequences of S tokens, T tokens, K slots per token, R routed tokens (one per token and slot) sorted by expert, E
experts, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from forge_moe.config import RouterConfig

__all__ = [
    "CachingContext",
    "Choose",
    "DenseFeedForward",
    "Dispatched",
    "Dispatcher",
    "OverlappingDispatcher",
    "Score",
    "TokenContext",
    "Weigh",
]

V = TypeVar("V")


class Dispatched(NamedTuple):
    """Routed tokens for the experts of this process.

    rows (R, D) sorted by expert; counts (E,) int64 on the device, the number of rows of each local expert; meta, an object
    that `combine` of the same dispatcher takes.
    """

    rows: Tensor
    counts: Tensor
    meta: Any


class Dispatcher(Protocol):
    """Moves tokens to experts and the experts' outputs back."""

    def dispatch(self, x: Tensor, weights: Tensor, ids: Tensor) -> Dispatched:
        """Send x (T, D) with weights (T, K) fp32 to experts ids (T, K) int64 in 0..E-1; a slot of id E is dropped."""

    def combine(self, rows: Tensor, meta: Any) -> Tensor:
        """Weighted sums (T, D) fp32 of the experts' outputs rows (R, D)."""


class OverlappingDispatcher(Dispatcher, Protocol):
    """A dispatcher that computes while tokens are in transfer: `MoE` calls only its `run`."""

    def run(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        experts: Callable[..., Tensor],
        overlapped: Callable[[], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Dispatch, call `experts(rows, counts, full=...)` and combine: (T, D) fp32, and the result of `overlapped`.

        `full=True` promises that counts.sum() is R. `overlapped()` is called before the host waits for sizes;
        without it the second result is None.
        """


class Score(Protocol):
    """Turns logits into scores of at least 0."""

    def __call__(self, logits: Tensor, /) -> Tensor:
        """(T, E) -> (T, E), differentiable."""


class Choose(Protocol):
    """Chooses experts; the ids are recorded, and replayed when the layer is recomputed."""

    def __call__(self, scores: Tensor, config: RouterConfig, valid: Tensor, /) -> Tensor:
        """Scores (T, E), with the expert bias added and without autograd -> ids (T, K) int64 in 0..E-1.

        valid (T,) bool is False on pads. A slot of id E is dropped.
        """


class Weigh(Protocol):
    """Weights the chosen experts by their scores without the expert bias."""

    def __call__(
        self, logits: Tensor, scores: Tensor, ids: Tensor, config: RouterConfig, /
    ) -> Tensor:
        """logits and scores (T, E), ids (T, K) in 0..E-1 -> weights (T, K), differentiable."""


class TokenContext(Protocol):
    """Tensors about the tokens of a batch. Each attribute may be None or absent."""

    @property
    def valid(self) -> Tensor | None:
        """(B, S) bool, False on pads, which are neither routed nor counted."""

    @property
    def document_ids(self) -> Tensor | None:
        """(B, S) int, equal and adjacent within a document of a packed sequence."""

    @property
    def token_ids(self) -> Tensor | None:
        """(B, S) int, recorded by `forge_moe.traces` on request."""


class CachingContext(Protocol):
    """A context that computes a value once per forward rather than once per layer."""

    def once(self, key: Any, make: Callable[[], V], /) -> V:
        """`make()`, or the value that an earlier call with this key computed."""


class DenseFeedForward(Protocol):
    """A feed-forward to turn into experts; a gated one has `gate_proj` too. Linear layers have no bias."""

    up_proj: nn.Linear
    down_proj: nn.Linear
