"""Worker processes that read rows ahead, and end with the process that trains."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from forge_data._torch_compat import end_workers
from forge_data.collate import as_tensors
from forge_data.errors import InvalidData
from forge_data.ledger import Ledger
from forge_data.protocols import Stream

_PR_SET_PDEATHSIG = 1  # of prctl(2)


class Workers:
    """`num_workers` processes that read the rows of consecutive steps from `cursor` on.

    `rows` (of a rank) are offsets in a global batch, `ledger` says which instances are left out. `close` ends
    the processes.
    """

    def __init__(
        self,
        stream: Stream,
        cursor: int,
        global_batch: int,
        rows: np.ndarray,
        num_workers: int,
        ledger: Ledger,
    ) -> None:
        loader: DataLoader[Any] = DataLoader(
            _Fetch(stream),
            batch_size=None,
            sampler=_Steps(cursor, global_batch, rows, ledger),
            num_workers=num_workers,
            collate_fn=_unchanged,
            worker_init_fn=_leave_signals_to_parent,
            # Without a generator torch draws a seed from the global one, and a run with workers would
            # draw other random numbers than a run without.
            generator=torch.Generator(),
        )
        self._iterator = iter(loader)
        # multiprocessing's own exit hook sends one SIGTERM, which a worker ignores (see
        # `_leave_signals_to_parent`), and waits for ever. Hooks run in reverse order: this one is first.
        # It must not refer to `self`, or a loader without users would never be collected.
        self._end = functools.partial(end_workers, self._iterator)
        atexit.register(self._end)

    def fetch(self) -> dict[str, Any]:
        """The stream's arrays of the next step, as tensors; raises the InvalidData of a worker."""
        arrays = next(self._iterator)
        if isinstance(arrays, InvalidData):
            raise arrays
        found: dict[str, Any] = arrays
        return found

    def close(self) -> None:
        """End and join the processes."""
        atexit.unregister(self._end)
        self._end()


class _Steps:
    """Endless sampler: the instance ids of this rank for each step."""

    def __init__(self, cursor: int, global_batch: int, rows: np.ndarray, ledger: Ledger) -> None:
        self._arguments = cursor, global_batch, rows, ledger

    def __iter__(self) -> Iterator[np.ndarray]:
        cursor, global_batch, rows, ledger = self._arguments
        while True:
            yield ledger.ids(cursor + rows)
            cursor += global_batch


class _Fetch(Dataset[Any]):
    """Runs in a worker: reads the rows of one step."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __getitem__(self, instance_ids: Any) -> Any:
        try:
            arrays = self._stream.arrays(instance_ids)
        except InvalidData as error:
            # Returned, not raised: torch would wrap it with a traceback of the worker in its message.
            return error
        return as_tensors(arrays)


def _unchanged(item: Any) -> Any:
    return item


def _leave_signals_to_parent(worker: int) -> None:
    """Ignore signals that ask the job to stop: the parent decides, and needs a batch or two before its save.

    A terminal sends SIGINT (SIGHUP when it closes), and a scheduler SIGTERM, to every process of the
    job. A second SIGTERM ends the worker, so that a hanging one cannot outlive the parent's exit.
    """
    die_with_parent()
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, signal.SIG_DFL))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies from any cause (Linux only).

    A forked worker has copies of its parent's sockets: while it lives, other ranks do not see that
    the parent has died.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:  # the parent died before the call above, so no signal will come
        os._exit(1)
