"""The host lane of a step: this rank's vote on its way to the others, and the decision of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import forge_data
from forge_resilience import Decision, ExitCode, Vote
from forge_train._shared.limits import limit_problem
from forge_train._shared.problems import problems_of
from forge_train.errors import DataError, Report, raise_reported, received, report_of
from forge_train.run.run import Run


def fault_code(fault: Exception | None) -> int:
    """The exit code of an error in reading this rank's data; 0 for none."""
    if fault is None:
        return 0
    known = isinstance(fault, forge_data.InvalidData | OSError) and not limit_problem(fault)
    return ExitCode.DATA_ERROR if known else ExitCode.ERROR


class PendingVotes:
    """The weight of all labels of the global batch, on its way: the votes travel during the first forward.

    `wait` also raises what ranks report in them: errors of their data, another position.

    vote: this rank's. fault: the error behind `vote.fault`. counted: called once, with the sums of `vote.counts`, as soon as
    they are known.
    """

    def __init__(
        self,
        run: Run,
        vote: Vote,
        fault: Exception | None,
        counted: Callable[[Sequence[int]], None],
    ) -> None:
        self._run, self._fault, self._counted = run, fault, counted
        self._pending = run.agreement.start(vote)
        self._decision: Decision | None = None

    @property
    def decision(self) -> Decision:
        """What all ranks decided, once `wait` has returned."""
        assert self._decision is not None
        return self._decision

    def wait(self) -> float:
        """The sum of the counts of all ranks, 1 where it is 0; further calls return it at once.

        Raises on all ranks if one of them cannot go on, before anything is updated.
        """
        if self._decision is None:
            decision = self._pending.wait()
            self._check(decision)
            self._decision = decision
            self._counted(decision.counts)
        # Only 0 becomes 1: a floor of 1 would rescale batches whose labels weigh less than that.
        return self._decision.count or 1.0

    def _check(self, decision: Decision) -> None:
        step = self._run.progress.step + 1
        if decision.faults:
            self._raise_faults(decision)
        if problem := decision.data_problem:
            raise DataError([f"step {step}: {problem}"])

    def _raise_faults(self, decision: Decision) -> None:
        """Record the faults of all ranks and raise them; every rank sends its own, if it has one."""
        fault, report, done = self._fault, None, self._run.progress.step
        if fault is not None:
            place = getattr(fault, "where", "")
            where = f"step {done + 1}: {type(fault).__name__}{f': {place}' if place else ''}"
            report = [int(fault_code(fault)), *report_of(DataError(problems_of(fault), where))[1:]]
        reports: list[Report] = self._run.agreement.exchange(report)
        for rank, code in decision.faults.items():
            cause = "\n".join(str(received(p)) for p in (reports[rank] or [])[1:]) or None
            self._run.record("fault", step=done, rank=rank, code=code, cause=cause)
        # A mistake in a user's code keeps its traceback on the rank where it happened.
        if fault is not None and fault_code(fault) == ExitCode.ERROR:
            raise fault
        raise_reported(reports)
