"""Tokenize chunks in this process or in several, which end with it; a process that dies is named and replaced."""

from __future__ import annotations

import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from forge_data._shared.parents import die_with
from forge_data._shared.problems import WithProblems
from forge_data.errors import InvalidData, invalid_data
from forge_data.prepare.chunks import Counts, write_chunk
from forge_data.prepare.plan import Chunk, Settings
from forge_data.tokenizer import ByteTokenizer, JsonTokenizer
from forge_data.workers import processes

__all__ = ["run_chunks"]

_DEATHS = 2  # of workers at one chunk, before it is given up: it may be what ends them
_log = logging.getLogger("forge_data")


def run_chunks(
    chunks: Sequence[Chunk],
    folder: Path,
    encoder: ByteTokenizer | JsonTokenizer,
    settings: Settings,
    workers: int,
    report: Callable[[Counts], None],
) -> None:
    """Write the files of all chunks; `report` is called with what these chunks have given so far.

    With one worker in this process, else in processes of one thread each. When chunks fail, the error is
    that of the first of them in the order of the plan, and later chunks may or may not be there. Raises
    as `write_chunk`, and InvalidData for a chunk at which two workers died.
    """
    if workers == 1 or len(chunks) < 2:
        done = Counts(0, 0, 0)
        for chunk in chunks:
            done += write_chunk(folder, chunk, encoder, settings, _added_to(done, report))
            report(done)
        return
    pool = _Pool(chunks, (folder, encoder, settings), report)
    try:
        pool.run(min(workers, len(chunks)))
    finally:
        pool.close()


def _added_to(done: Counts, report: Callable[[Counts], None]) -> Callable[[Counts], None]:
    return lambda counts: report(done + counts)


class _Worker:
    """A process that writes the chunks it is sent."""

    def __init__(self, chunks: Sequence[Chunk], arguments: tuple[Any, ...]) -> None:
        context = processes()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_work,
            args=(os.getpid(), theirs, chunks, *arguments),
            daemon=True,
            name="forge-data",
        )
        self.process.start()
        theirs.close()  # else the end of the worker would not be the end of its messages
        self.index = -1
        self.counts = Counts(0, 0, 0)

    def begin(self, index: int) -> None:
        self.index, self.counts = index, Counts(0, 0, 0)
        self.connection.send(index)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class _Pool:
    """Hand out chunks in order, and collect the messages of workers."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        arguments: tuple[Any, ...],
        report: Callable[[Counts], None],
    ) -> None:
        self._chunks, self._arguments, self._report = chunks, arguments, report
        self._waiting = deque(range(len(chunks)))
        self._workers: list[_Worker] = []
        self._done = Counts(0, 0, 0)
        self._deaths = [0] * len(chunks)
        self._errors: dict[int, Exception] = {}

    def run(self, workers: int) -> None:
        for _ in range(workers):
            self._begin(_Worker(self._chunks, self._arguments))
        while self._workers:
            busy = {worker.connection: worker for worker in self._workers}
            for connection in wait(list(busy)):
                self._receive(busy[connection])
            self._report(sum((w.counts for w in self._workers), self._done))
        if self._errors:
            raise self._errors[min(self._errors)]

    def close(self) -> None:
        for worker in self._workers:
            worker.end()

    def _begin(self, worker: _Worker, index: int | None = None) -> None:
        """Give a worker a chunk, the next by default, or end it. After an error there is no next: all chunks before
        the failed one have been handed out."""
        if worker not in self._workers:
            self._workers.append(worker)
        if index is None and self._waiting and not self._errors:
            index = self._waiting.popleft()
        if index is None:
            self._workers.remove(worker)
            worker.end()
            return
        with suppress(OSError):  # it died already: `_receive` finds out
            worker.begin(index)

    def _receive(self, worker: _Worker) -> None:
        try:
            kind, content = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        if kind == "counts":
            worker.counts = content
            return
        if kind == "done":
            self._done += content
        else:
            self._errors[worker.index] = content
        worker.counts = Counts(0, 0, 0)
        self._begin(worker)

    def _replace(self, worker: _Worker) -> None:
        """Log a dead worker and start its chunk again, once."""
        worker.process.join()
        code = worker.process.exitcode or 0
        why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        index, chunk = worker.index, self._chunks[worker.index]
        self._workers.remove(worker)
        worker.end()

        self._deaths[index] += 1
        if self._deaths[index] >= _DEATHS:
            rule = f"ended {_DEATHS} workers, the last {why}; each holds its longest document and some MB"
            fix = "use fewer workers if memory was short, or prepare the file alone to see more"
            error: InvalidData = invalid_data("", "killed", ..., rule, fix, where=chunk)
            self._errors[index] = error
            return
        _log.warning("worker %d was %s at %s; it is begun again", worker.process.pid, why, chunk)
        if not self._errors or index < min(self._errors):
            self._begin(_Worker(self._chunks, self._arguments), index)


def _work(
    parent: int,
    connection: Connection,
    chunks: Sequence[Chunk],
    folder: Path,
    encoder: ByteTokenizer | JsonTokenizer,
    settings: Settings,
) -> None:
    """Run in a worker: receive numbers of chunks, send counts and the end or an error of each."""
    die_with(parent)
    # Ctrl-C comes to all processes of a terminal: the parent ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # each worker is one thread, as there are several workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    while True:
        try:
            chunk = chunks[connection.recv()]
        except EOFError:
            return
        try:
            counts = write_chunk(
                folder, chunk, encoder, settings, lambda found: connection.send(("counts", found))
            )

        except (ValueError, OSError) as error:
            plain = ValueError if isinstance(error, ValueError) else OSError
            found = error if isinstance(error, WithProblems) else plain(str(error))
            connection.send(("error", found))
        else:
            connection.send(("done", counts))
