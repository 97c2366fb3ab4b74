"""Hook points for activations."""

from typing import ClassVar

from torch import Tensor, nn


class WithPoints(nn.Module):
    """A module whose `forward` passes some of its tensors through `point`, under the names in `points`.

    A subclass with a forward of its own that passes others lists them in `points`.
    """

    points: ClassVar[tuple[str, ...]] = ()

    def point(self, name: str, value: Tensor) -> Tensor:
        """Return `value`; inside of `forge_core.interp` it is read here, or replaced."""
        return value
