"""Checkpoints of a training loop: what is saved, what is on its way, and what failed."""

from collections.abc import Callable, Mapping
from typing import Any

from forge_ckpt.read.load import Check
from forge_ckpt.store import Store

__all__ = ["TrainingCheckpoints"]


class TrainingCheckpoints:
    """The saves of a loop, of which each rank learns at another time. Collective, but for ``listen``.

        checkpoints = TrainingCheckpoints(store, {"model": model, "optimizer": optimizer})
        for step in range(1, 1001):
            checkpoints.listen()
            committed, retry = agree(checkpoints.committed, checkpoints.wants_retry)   # max and any over the ranks
            train(step)
            for saved in checkpoints.announce(committed):
                print(f"step {saved} can be loaded")
            if step % 100 == 0 or retry:
                checkpoints.settle()
                checkpoints.save(step, wait=False)

    last_step: the step of the newest checkpoint that was loaded or saved, or is being saved, -1 without one.
    committed: the newest step that this rank knows to be committed. wants_retry: whether a failed save must be
    made good now; the first in a row in the next step, those after it when the next save is due.
    ``after_load(step)`` is called with the state of a step.

    A save in the background that the disk refuses: ``listen`` learns of it and sets ``wants_retry``, the loop tells the
    other ranks, and all save after that step. ``settle`` raises OSError after ``max_failures`` in a row. A save
    that is waited for raises at once. Older checkpoints are intact in each of these cases.
    """

    def __init__(
        self,
        store: Store,
        state: dict[str, Any],
        check: Check | None = None,
        after_load: Callable[[int], None] = lambda step: None,
        max_failures: int = 3,
    ) -> None:
        self.store, self.state, self.check = store, state, check
        self.last_step = self.committed = -1
        self.wants_retry = False
        self._after_load, self._max_failures = after_load, max_failures
        # A save until all ranks know its end, so that it is announced once.
        self._in_flight: int | None = None
        self._failures = 0

    def set_loaded(self, step: int) -> None:
        """Go on from the checkpoint of a step, which was loaded; -1: from the initial state."""
        self._after_load(step)
        self.last_step = self.committed = step

    def go_back(self, latest: int, wanted: int, first: int = 0) -> bool:
        """Load the newest checkpoint up to step ``wanted``, or else the oldest from ``first`` to ``latest``, and remove
        those after it. False if there is no such checkpoint. After ``settle``."""
        steps = [step for step in self.store.steps() if first <= step <= latest]
        if not steps:
            return False
        target = max((step for step in steps if step <= wanted), default=steps[0])
        # first the load, then the removal: a damaged target must leave what is after it
        step = self.store.load(self.state, self.check, newest=target)
        assert step is not None  # steps exist, so load returns one or raises CorruptCheckpoint
        self.store.discard_after(step)
        self.set_loaded(step)
        return True

    def settle(self) -> list[int]:
        """Wait for the save in flight; [its step] if it is committed and no rank knew it before.

        OSError for the ``max_failures``-th in a row that the disk refused; fewer are left to the next save.
        """
        failure = None
        try:
            self.store.wait()
        except OSError as error:
            failure = error
        self.listen()
        if failure is not None and self._failures >= self._max_failures:
            raise failure
        return self.announce(self.committed)

    def save(self, step: int, wait: bool, metrics: Mapping[str, float] | None = None) -> None:
        """Save the state of ``step``, after ``settle``; without ``wait`` it may change when this returns."""
        self.wants_retry = False
        self.last_step = self._in_flight = step
        self.store.save(step, self.state, wait, metrics)

    def listen(self) -> None:
        """Learn what became of saves, on this rank."""
        for event in self.store.poll():
            if event.kind == "committed":
                self.committed, self._failures = event.step, 0
            elif event.kind == "failed":
                self._failures = event.failures
                self.wants_retry = self._failures == 1
                self.last_step = self.committed

    def announce(self, committed: int) -> list[int]:
        """[the step in flight], once, if it is the one that all ranks now know to be ``committed``."""
        if self._in_flight is None or self._in_flight != committed:
            return []
        self._in_flight = None
        return [committed]

    @property
    def damaged(self) -> list[tuple[int, str]]:
        """(step, reason) of the checkpoints that a load found damaged."""
        return list(self.store.quarantined)
