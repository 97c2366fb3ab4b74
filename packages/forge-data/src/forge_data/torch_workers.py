"""Workers of torch's DataLoader that read a loader, as its own process sees them."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import get_worker_info

from forge_data._shared.problems import invalid
from forge_data.config import MAX_WORKERS

# offsets in the shared page; _PIDS is the last, as the pid of worker w is at _PIDS + w
_MOVES, _TAKEN, _PIDS = 0, 1, 2


class TorchWorkers:
    """Which workers of torch's DataLoader read copies of a loader.

    A DataLoader tells its dataset nothing of its workers, and theirs are copies: the position of the loader in its own
    process then stays where it was. Forked workers write their pids into a page of shared memory. With the start methods
    "spawn" and "forkserver" the own process keeps what it pickled the loader for.
    Usage: `workers = TorchWorkers(); workers.moved(); workers.require_none("next"); workers.reset()`, and `claim` in a worker.
    """

    def __init__(self) -> None:
        self._page = memoryview(mmap.mmap(-1, 8 * (_PIDS + MAX_WORKERS))).cast("q")
        self._moves = 0  # a forked worker has the number of its start, as the fork copies it
        self._spawned: list[Any] = []
        self._spawned_as: tuple[int, int] | None = (
            None  # its pid, as a fork of it has another, and the number of copies before it
        )

    def moved(self) -> None:
        """Note that the position of the loader has changed, unless this is a worker.

        Workers that were forked before then raise.
        """
        if get_worker_info() is None:
            self._moves += 1
            self._page[_MOVES] = self._moves

    def require_none(self, use: str) -> None:
        """Raise ValueError in the loader's own process if workers have taken batches."""
        if self._page[_TAKEN] or self._spawned:
            rule = f"cannot do {use} here: workers of torch's DataLoader read copies of it, and it has not moved"
            fix = "save loader.state_dict(after=batch) with the last batch that was used; load that state before other calls"
            raise invalid("loader", "workers", ..., rule, fix)

    def reset(self) -> None:
        """Forget workers that have ended. Raises ValueError while one runs: it would not see what changes now."""
        self.moved()  # a worker that has not begun raises
        if self._running():
            gc.collect()  # a traceback may hold an iterator that is no longer used
        running = self._running()
        if running:
            rule = f"must be loaded before iter(): workers of torch's DataLoader (pids {running}) read copies of this loader"
            fix = "delete the iterator, load the state, and begin another one"
            raise invalid("state", "workers", ..., rule, fix)
        self._spawned.clear()
        for slot in range(_TAKEN, len(self._page)):
            self._page[slot] = 0

    def _running(self) -> list[int]:
        """The pids of workers that have not ended."""
        forked = [pid for pid in self._page[_PIDS:] if pid and _runs(pid)]
        return forked + [popen.pid for popen in self._spawned if popen.poll() is None]

    def claim(self, loaded: bool) -> None:
        """Begin to read in a worker. loaded: it has loaded a state of its own.

        Raises ValueError if the loader moved after the worker began, or workers before it began at the same position.
        """
        worker = get_worker_info()
        assert worker is not None, "claim is called in a worker"
        if worker.num_workers > MAX_WORKERS:
            rule = f"must be at most {MAX_WORKERS}"
            raise invalid("num_workers", "range", worker.num_workers, rule, "use fewer workers")

        pid, slot = os.getpid(), _PIDS + worker.id
        if self._spawned_as is not None and self._spawned_as[0] == pid:
            # a DataLoader starts its workers in order, so that those of a second iterator have higher numbers
            moved, again = False, self._spawned_as[1] != worker.id
        else:
            again = self._page[slot] not in (0, pid)
            self._page[slot], self._page[_TAKEN] = pid, 1
            moved = self._page[_MOVES] != self._moves

        if moved:
            rule = "was changed or read after iter() of the DataLoader"
            raise invalid("loader", "moved", ..., rule, "begin another iterator")
        if again and not loaded:
            rule = "is read by a second iterator with workers, which would repeat samples"
            fix = "call loader.load_state_dict(loader.state_dict(after=batch)) with the last batch that was used before it"
            raise invalid("loader", "second", ..., rule, fix)

    def __getstate__(self) -> dict[str, Any]:
        popen = get_spawning_popen()
        if popen is None:  # a copy, such as of copy.deepcopy, has no workers
            return {"number": None}
        self._spawned.append(popen)
        return {"number": len(self._spawned) - 1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        if state["number"] is not None:
            self._spawned_as = os.getpid(), state["number"]


def _runs(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
