"""[resilience.nonfinite, .spike, .rollback] in the runner: events of bad steps, and the end or way back of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from forge_data import Loader
from forge_resilience import NumericsPolicy
from forge_resilience.policy import Outcome
from forge_train.errors import NumericsError
from forge_train.run.checkpoints import Checkpoints
from forge_train.run.run import Run


class RollbackRequested(Exception):
    """The run goes back to before `outcome.first`. Raised by all ranks alike."""

    def __init__(self, outcome: Outcome) -> None:
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
        """What was judged so far."""
        return self._run.progress.policy

    def take(self) -> Tensor:
        """Verdicts since the last look, as a tensor on the device; no sync."""
        taken: Tensor = self.policy.take()
        return taken

    def check(self, last_saved: int) -> None:
        """Record bad steps; raise NumericsError or RollbackRequested where the policy says so.

        Up to the step of the row that waits, whose verdicts are on the host; without one up to the last step (a sync).
        """
        run, verdicts = self._run, self._run.rows.verdicts()
        read = self.take().tolist() if verdicts is None else verdicts
        found = self.policy.decide(read, run.progress.step)
        run.progress.skipped_since_row += len(found.skipped)
        others = [n for n in found.skipped if n not in (*found.spikes, *found.unlabeled)]
        if found.unlabeled:
            run.record("skip", step=found.unlabeled[-1], unlabeled=len(found.unlabeled))
        if others:
            run.record("skip", step=others[-1], skipped=len(others), in_a_row=found.in_a_row)
        if found.spikes:
            run.record("spike", step=found.spikes[-1], spikes=len(found.spikes))
        if found.action == "rollback":
            raise RollbackRequested(found)
        if found.action == "stop":
            run.send_row()
            _stop(found, self.policy, last_saved)

    def go_back(self, checkpoints: Checkpoints, bad: Outcome) -> None:
        """Load a checkpoint from before the bad steps, and leave their data out of the stream.

        A kill on the way loses nothing: the next life comes to the same steps, and goes back again.
        """
        run = self._run
        self._refuse_more_rollbacks(bad, checkpoints.last_step)
        at, rollbacks = run.progress.step, self.policy.rollbacks + 1
        before = run.config.resilience.rollback.batches_before
        known = len(checkpoints.damaged)
        with run.phase("load"):
            run.announce(checkpoints.settle())
            windows = [*run.loader.skipped, _instances_of_steps(run, bad.first - before, bad.last)]
            with run.evaluation_point():
                began = time.perf_counter()
                found = checkpoints.go_back(bad.first - 1, bad.first - 1 - before)
                seconds = time.perf_counter() - began
        run.record_quarantine(checkpoints.damaged[known:])
        if not found:
            _refuse_without_checkpoint(bad, run.folder.checkpoints)
        self.policy.rollbacks = rollbacks
        skip_windows(run.loader, windows)
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

    def _refuse_more_rollbacks(self, found: Outcome, last_saved: int) -> None:
        """Raise NumericsError if the run went back as often as it may."""
        limit = self.policy.rollback.max_rollbacks
        if self.policy.rollbacks >= limit:
            raise NumericsError(
                [f"{_bad_steps(found)} after {limit} rollbacks (resilience.rollback.max_rollbacks {limit}); "
                 f"{_intact(last_saved)}: lower optimizer.lr or resilience.rollback.lr_factor and run again"]
            )  # fmt: skip


def skip_windows(loader: Loader, windows: Sequence[tuple[int, int]]) -> None:
    """Leave these instances out from the cursor on; what is before it is in the ledger already."""
    for first, last in windows:
        following = int(loader.ids(loader.cursor, loader.cursor + 1)[0])
        if last >= following:
            loader.skip(max(first, following), last)


def _instances_of_steps(run: Run, first: int, last: int) -> tuple[int, int]:
    """The first and last instance of steps `first` to `last`, up to the last one that is counted."""
    loader, course, step = run.loader, run.course, run.progress.step
    windows = loader.skipped
    end = course.cursor(run.progress.tokens, windows)  # the loader may be a step ahead
    start = course.steps_back(end, step - first + 1, windows, loader.began)
    ids = loader.ids(start, course.steps_back(end, step - last, windows, loader.began))
    return int(ids[0]), int(ids[-1])


def _refuse_without_checkpoint(found: Outcome, store: object) -> NoReturn:
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
