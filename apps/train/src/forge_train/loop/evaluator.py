"""Evaluations during a run: when they are due, and the newest result."""

from __future__ import annotations

from forge_parallel.metric_rows import finite
from forge_train.run.run import Run


class Evaluator:
    """Evaluates the held-out data of a run. `val_loss` is the newest validation loss, in nats per token.

    wanted: whether anything is evaluated.
    """

    def __init__(self, run: Run, wanted: bool = True) -> None:
        self._run, self._wanted = run, wanted
        self.forget()

    def forget(self) -> None:
        """Drop the result after a rollback: its step is undone."""
        self._step, self._found = -1, dict[str, float]()
        self.val_loss: float | None = None

    def is_due(self) -> bool:
        """At the interval and at the last step; such a step has a row in any case."""
        run = self._run
        last = run.progress.step == run.total_steps
        return last or run.evaluation.due(run.progress.step, last)

    def loss_at(self, step: int) -> float | None:
        """The validation loss of a step; None if it was not evaluated."""
        return self._found.get("val_loss") if self._step == step else None

    def __call__(self) -> None:
        """Evaluate the sets that are due, once a step. Collective."""
        run, step = self._run, self._run.progress.step
        last = step == run.total_steps
        if self._step == step or not self._wanted or not run.evaluation.due(step, last):
            return
        with run.phase("evaluate") as pause, run.evaluation_point():
            found = run.evaluation(run.first_compute, run.label_weight, run.agreement, step, last)

        run.extensions.call("after_evaluation")
        self._step, self._found = step, found
        self.val_loss = found.get("val_loss", self.val_loss)
        if step:
            run.rows.update(found)
        else:
            row = run.rows.at_start(found)
            run.recorder.write(row)
            run.extensions.call("on_row", row)
        run.record("evaluation", step=step, **finite(found), seconds=pause.seconds)
        for name, loss in run.evaluation.losses(found).items():
            run.extensions.call("on_evaluated", name, loss)
