"""resilience.nonfinite: steps whose numbers are not finite change nothing; too many in a row end the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from forge_resilience import Skips
from forge_train.errors import NumericsError


class SkipPolicy:
    """Counts skipped steps on the device; the host reads the counts a step late, with the row of metrics.

    `record` writes the event `skip`.
    """

    def __init__(self, limit: int, record: Callable[..., None]) -> None:
        self._limit, self._record = limit, record
        self._skips = Skips()
        self._since_row = 0

    def add(self, bad: Tensor) -> None:
        """Count a step's verdict (0-dim, 1.0 for a skipped step); no sync."""
        self._skips.add(bad)

    def take(self) -> Tensor:
        """(steps skipped, longest run of them) since the last look, as a tensor on the device; no sync."""
        taken: Tensor = self._skips.take()
        return taken

    def take_since_row(self) -> int:
        """Steps skipped since the last row that was sent."""
        count, self._since_row = self._since_row, 0
        return count

    def check(self, counts: Sequence[float] | None, step: int, last_saved: int) -> None:
        """Record skipped steps, and raise NumericsError if more than the limit followed one another.

        `counts` are those of `take`, read with a row; None reads what the device has counted by now (a sync).
        """
        skipped, longest = map(int, self._skips.read() if counts is None else counts)
        if not skipped:
            return
        self._since_row += skipped
        self._record("skip", step=step, skipped=skipped, in_a_row=longest)
        if longest > self._limit:
            raise NumericsError(
                [f"by step {step}: the loss or the gradient norm of {longest} steps in a row must be finite "
                 f"in at least one of {self._limit + 1} (resilience.nonfinite.max_in_a_row {self._limit}); they changed no weight, "
                 f"and the checkpoints up to step {max(last_saved, 0)} are intact: lower optimizer.lr "
                 "or train.max_grad_norm and run again"]
            )  # fmt: skip
