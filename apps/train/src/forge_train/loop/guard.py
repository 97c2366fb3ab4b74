"""[resilience.nonfinite, .spike, .rollback] in the runner: events of bad steps, and the end or way back of a run."""

from __future__ import annotations

import time
from typing import NoReturn

from forge_resilience import NumericsPolicy
from forge_resilience.policy import StepVerdict
from forge_train.errors import NumericsError
from forge_train.run.checkpoints import Checkpoints
from forge_train.run.run import Run


class RollbackRequested(Exception):
    """The run goes back to before `outcome.first`. Raised by all ranks alike."""

    def __init__(self, outcome: StepVerdict) -> None:
        self.outcome = outcome
        super().__init__(f"{outcome.cause} in steps {outcome.first} to {outcome.last}")


class Guard:
    """Judges the numbers of steps by the policy of a run, which is part of its checkpoints.

    A bad step is masked on the device at once. The host reads verdicts with the next row of metrics, or before a save: it ends
    the run, or goes back, up to `metrics.every_steps` steps after the bad one. Collective: every rank calls every method.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def policy(self) -> NumericsPolicy:
        """The policy, with its verdicts so far."""
        return self._run.progress.policy

    def check(self, last_saved: int) -> None:
        """Record bad steps; raise NumericsError or RollbackRequested where the policy says so.

        Up to the step of the row that waits, whose verdicts are on the host; without one up to the last step (a sync).
        """
        run, verdicts = self._run, self._run.rows.verdicts()
        read = self.policy.take().tolist() if verdicts is None else verdicts
        found = self.policy.decide(read, run.progress.step)
        run.progress.skipped_since_row += len(found.skipped)
        for event, fields in found.events():
            run.record(event, **fields)
        if found.action == "rollback":
            raise RollbackRequested(found)
        if found.action == "stop":
            run.send_row()
            rule = f"{found.bad_steps}: resilience.{self.policy.stop_rule(found.cause)}"
            fix = "lower optimizer.lr or train.max_grad_norm and run again, or use another action"
            raise NumericsError([f"{rule}; {_intact(last_saved)}: {fix}"])

    def go_back(self, checkpoints: Checkpoints, bad: StepVerdict) -> None:
        """Load a checkpoint from before the bad steps, and skip their data.

        A kill meanwhile loses nothing: after the restart the same steps come, and the run goes back again.
        """
        run = self._run
        self._check_limit(bad, checkpoints.last_step)
        at, rollbacks = run.progress.step, self.policy.rollbacks + 1
        ago = at - bad.first + 1
        before = run.config.resilience.rollback.batches_before
        known = len(checkpoints.damaged)

        with run.phase("load"):
            run.announce(checkpoints.settle())
            left_out = run.course.instances_back(
                run.loader, run.progress.tokens, ago + before, at - bad.last
            )
            windows = [*run.loader.skipped, left_out]
            with run.evaluation_point():
                began = time.perf_counter()
                found = checkpoints.go_back(bad.first - 1, bad.first - 1 - before)
                seconds = time.perf_counter() - began

        run.record_quarantine(checkpoints.damaged[known:])
        if not found:
            rule = f"holds no state of a run of step {bad.first - 1} or before to go back to"
            fix = "save more often (checkpoint.every_steps), or keep more checkpoints (checkpoint.keep_last)"
            raise NumericsError([f"{bad.bad_steps}, and {run.folder.checkpoints} {rule}; {fix}"])

        self.policy.rollbacks = rollbacks
        run.loader.skip_rest(windows)
        run.count_steps()
        run.optimizer.zero_grad()
        run.recorder.reopen(run.progress.step)
        run.open_rows()

        run.record(
            "rollback",
            step=at,
            to_step=run.progress.step,
            cause=bad.cause,
            bad_steps=[bad.first, bad.last],
            skipped_instances=run.loader.skipped,
            total_steps=run.total_steps,
            rollbacks=rollbacks,
            seconds=round(seconds, 4),
        )

    def _check_limit(self, bad: StepVerdict, last_saved: int) -> None:
        """Raise NumericsError if the run went back as often as it may."""
        limit = self.policy.rollback.max_rollbacks
        if self.policy.rollbacks >= limit:
            rule = f"after {limit} rollbacks (resilience.rollback.max_rollbacks {limit})"
            fix = "lower optimizer.lr or resilience.rollback.lr_factor and run again"
            raise NumericsError([f"{bad.bad_steps} {rule}; {_intact(last_saved)}: {fix}"])


def raise_without_saves(bad: StepVerdict) -> NoReturn:
    """There is nothing to go back to, as the run saves nothing."""
    raise NumericsError(
        [f"{bad.bad_steps}, and a run that saves nothing cannot go back; of a replay, the run's journal "
         f"has no such rollback: look at step {bad.first} itself"]
    )  # fmt: skip


def _intact(last_saved: int) -> str:
    saved = f"the checkpoints up to step {last_saved} are intact"
    if last_saved < 0:
        saved = "nothing was saved before"
    return f"they changed no weight, and {saved}"
