"""Output projections: with a weight of their own, or by that of the embedding.

Shapes: B rows, S tokens, D width of the residual stream, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.model.config import TransformerConfig

#: Of the stream behind the final norm (B, S, D) and the head's weight (V, D), and `softcap` where logits have one.
Then = Callable[..., Tensor]


class Finish(NamedTuple):
    """Logits z become softcap * tanh(scale z / softcap), or scale z. A soft-cap keeps one more (B, S, V)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def within(self, then: Then, x: Tensor, weight: Tensor) -> Tensor:
        """The result of a loss that makes the logits itself, of a stream that is scaled for them; a soft-cap is
        handed on as `softcap`."""
        given = {} if self.softcap is None else {"softcap": self.softcap}
        return then(x if self.scale == 1.0 else x * self.scale, weight, **given)


class Head(nn.Linear):
    """The output projection: (B, S, D) -> (B, S, V), or the result of `then(x, weight (V, D))`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.dim, config.vocab_size, bias=False)
        self.finish = Finish(config.logits_scale, config.logits_softcap)

    def forward(self, x: Tensor, then: Then | None = None) -> Tensor:
        if then is not None:
            return self.finish.within(then, x, self.weight)
        return self.finish(super().forward(x))


class TiedHead(nn.Module):
    """The same by the embedding's weight (V, D), which it does not hold, so that nothing can untie it
    (`to_empty` would)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.finish = Finish(config.logits_scale, config.logits_softcap)

    def forward(self, x: Tensor, weight: Tensor, then: Then | None = None) -> Tensor:
        if then is not None:
            return self.finish.within(then, x, weight)
        return self.finish(F.linear(x, weight))
