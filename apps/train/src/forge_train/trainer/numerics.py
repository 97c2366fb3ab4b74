"""[resilience.nonfinite, .spike, .rollback] in the runner: events of bad steps, and the end or way back of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import Tensor

from forge_resilience import NumericsPolicy
from forge_resilience.policy import Outcome
from forge_train.config.schema import ResilienceConfig
from forge_train.errors import NumericsError


class Rollback(Exception):
    """The run goes back to before `outcome.first`. Raised by all ranks alike."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(f"{outcome.cause} in steps {outcome.first} to {outcome.last}")


class Numerics:
    """The policy of a run; the host reads its verdicts a step late, with the row of metrics.

    `record` writes the events `skip` and `spike`. `policy` is part of the checkpoint.
    """

    def __init__(self, config: ResilienceConfig, record: Callable[..., None]) -> None:
        self.policy = NumericsPolicy(config.nonfinite, config.spike, config.rollback)
        self._record = record
        self.since_row = 0  # steps skipped since the last row that was sent

    def take(self) -> Tensor:
        """Verdicts since the last look, as a tensor on the device; no sync."""
        taken: Tensor = self.policy.take()
        return taken

    def take_since_row(self) -> int:
        """Steps skipped since the last row that was sent."""
        count, self.since_row = self.since_row, 0
        return count

    def check(self, verdicts: Sequence[float] | None, step: int, last_saved: int) -> None:
        """Record bad steps up to `step`; raise NumericsError or Rollback where the policy says so.

        `verdicts` are those of `take`, read with a row; None reads what the device has by now (a sync).
        """
        found = self.policy.decide(self.take().tolist() if verdicts is None else verdicts, step)
        self.since_row += len(found.skipped)
        others = [n for n in found.skipped if n not in (*found.spikes, *found.unlabeled)]
        if found.unlabeled:
            self._record("skip", step=found.unlabeled[-1], unlabeled=len(found.unlabeled))
        if others:
            self._record("skip", step=others[-1], skipped=len(others), in_a_row=found.in_a_row)
        if found.spikes:
            self._record("spike", step=found.spikes[-1], spikes=len(found.spikes))
        if found.action == "rollback":
            raise Rollback(found)
        if found.action == "stop":
            _stop(found, self.policy, last_saved)

    def refuse_more_rollbacks(self, found: Outcome, last_saved: int) -> None:
        """Raise NumericsError if the run went back as often as it may."""
        limit = self.policy.rollback.max_rollbacks
        if self.policy.rollbacks >= limit:
            raise NumericsError(
                [f"{_bad_steps(found)} after {limit} rollbacks (resilience.rollback.max_rollbacks {limit}); "
                 f"{_intact(last_saved)}: lower optimizer.lr or resilience.rollback.lr_factor and run again"]
            )  # fmt: skip


def refuse_without_checkpoint(found: Outcome, store: object) -> NoReturn:
    """There is nothing to go back to."""
    raise NumericsError(
        [f"{_bad_steps(found)}, and {store} holds no state of a run of step {found.first - 1} or before to go back "
         "to; save more often (checkpoint.every_steps), or keep more checkpoints (checkpoint.keep_last)"]
    )  # fmt: skip


def raise_without_saves(found: Outcome) -> NoReturn:
    """There is nothing to go back to, as the run saves nothing."""
    raise NumericsError(
        [f"{_bad_steps(found)} ({found.cause}), and a run that saves nothing cannot go back; of a replay, the run's journal "
         f"has no such rollback: look at step {found.first} itself"]
    )  # fmt: skip


def _stop(found: Outcome, policy: NumericsPolicy, last_saved: int) -> NoReturn:
    if found.cause == "spike":
        spike = policy.spike
        of = "loss or grad_norm" if spike.of == "both" else spike.of
        rule = (f"{of} was more than {spike.sigma:g} standard deviations above the mean of {spike.window} steps "
                "(resilience.spike.action 'stop')")  # fmt: skip
        fix = "lower optimizer.lr, or use action 'skip' or 'rollback'"
    else:
        action, limit = policy.nonfinite.action, policy.nonfinite.limit
        rule = f"resilience.nonfinite.action {action!r} allows no such step"
        if limit:
            rule = f"resilience.nonfinite.max_in_a_row allows {limit} of them in a row"
        fix = "lower optimizer.lr or train.max_grad_norm and run again"
    raise NumericsError([f"{_bad_steps(found)}: {rule}; {_intact(last_saved)}: {fix}"])


def _bad_steps(found: Outcome) -> str:
    what = "a spike" if found.cause == "spike" else "numbers that are not finite"
    if found.first == found.last:
        return f"{what} in step {found.last}"
    return f"{what} in steps {found.first} to {found.last}"


def _intact(last_saved: int) -> str:
    saved = f"the checkpoints up to step {last_saved} are intact"
    if last_saved < 0:
        saved = "nothing was saved before"
    return f"they changed no weight, and {saved}"
