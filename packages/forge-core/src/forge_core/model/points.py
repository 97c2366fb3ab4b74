"""Places inside a module where somebody may look in or reach in."""

from typing import ClassVar

from torch import Tensor, nn


class WithPoints(nn.Module):
    """A module whose `forward` passes some of its tensors through `point`, under the names in `points`.

    A subclass with a forward of its own that passes others says so in `points`.
    """

    points: ClassVar[tuple[str, ...]] = ()

    def point(self, name: str, value: Tensor) -> Tensor:
        """`value` itself; inside `forge_core.interp` what is read here, or put in its place."""
        return value
