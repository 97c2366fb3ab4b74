"""The saves of a store, one after the other: written at once or in the background, committed, retained."""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ckpt import directories
from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import CorruptCheckpoint, StepExists
from forge_ckpt.rank_group import RankGroup
from forge_ckpt.read.load import verify_checkpoint
from forge_ckpt.read.reader import ForgeReader
from forge_ckpt.retention import Retention
from forge_ckpt.write.background import (
    BackgroundWriter,
    SaveEvent,
    SaveEvents,
    SaveHandle,
    Stopwatch,
)
from forge_ckpt.write.save import PlannedSave, SavePlans, plan_save
from forge_ckpt.write.staging import StagingArea
from forge_ckpt.write.writer import ForgeWriter

logger = logging.getLogger("forge_ckpt")
Content = Callable[[], dict[str, Any]]
# (group, step, reason) -> whether the step was there; it is quarantined
Quarantine = Callable[[RankGroup, int, str], bool]


@dataclass(frozen=True)
class SaverOptions:
    """How a store saves, as in the arguments of ``Store``; ``threads`` read and digest.

    ValueError for ``staging_gib`` or ``max_failures`` out of range.
    """

    digest: str
    staging_gib: float | None
    on_event: Callable[[SaveEvent], None] | None
    max_failures: int
    threads: int

    def __post_init__(self) -> None:
        if self.staging_gib is not None and not self.staging_gib > 0:
            fix = "use None for no bound"
            raise invalid("staging_gib", "range", self.staging_gib, "must be above 0", fix)
        if type(self.max_failures) is not int or self.max_failures < 1:
            rule = "must be an integer of at least 1"
            raise invalid("max_failures", "range", self.max_failures, rule, "use 3")


class Saver:
    """Saves below ``root``; the methods are collective but ``wait`` and ``close``.

    An OSError of a background save is logged, and the next save replaces it; the ``max_failures``-th in
    a row, and any other exception, is raised by the next call.
    """

    def __init__(
        self,
        group: RankGroup,
        root: Path,
        retention: Retention,
        quarantine: Quarantine,
        options: SaverOptions,
    ) -> None:
        self.events = SaveEvents(options.on_event)
        self._group = group
        self._writing_group: RankGroup | None = None  # of the background thread
        self._root, self._retention, self._quarantine = root, retention, quarantine
        self._options = options
        self._failures = 0  # in a row; the same on all ranks
        self._background = BackgroundWriter()
        self._plans = SavePlans()
        self._staging = StagingArea(options.staging_gib)

    def save(
        self,
        step: int,
        content: Content,
        metrics: Mapping[str, float] | None,
        wait: bool,
        watch: Stopwatch,
    ) -> SaveHandle:
        """Save a step that is not committed yet; returns when it is committed, or staged without ``wait``."""
        handle = SaveHandle(step)
        try:
            with self.reported(step, watch):
                path = directories.step_directory(self._root, step)
                save = self._plan(step, path, content, metrics)
                if wait:
                    handle.set_result(self._commit(self._group, save, step, watch))
                else:
                    with self._explained(step):
                        self._stage(save)
        except OSError as error:
            if wait or self._failures >= self._options.max_failures:
                raise
            # A full disk is left to the next save; wait and close raise its error if there is no next save.
            self._background.fail(handle, error)
            return handle

        if not wait:
            self.events.emit(SaveEvent("staged", step, watch()))
            self._background.start(lambda: self._commit_in_background(save, step, watch), handle)
        return handle

    def prepare(self, content: Content) -> None:
        """Plan background saves of ``content`` and take their memory, in the background, for the first one."""
        try:
            save = self._plan(0, self._root / "step-00000000.tmp-prepare", content, None)
        except OSError as error:  # a finished job saves nothing, another may have room by then
            if self._group.rank == 0:
                logger.warning("%s: a save would fail now: %s", self._root, error.__cause__)
            return
        try:
            self._make_writing_group()
            self._group.run_on_all_ranks(lambda: self._staging.check(save.layout.size))
            pieces, size = save.layout.pieces, save.layout.size
        finally:
            save.discard()
        for_cuda = any(piece.tensor.is_cuda for piece in pieces)

        def reserve() -> Path:
            # of one rank; the save meets it again, with all of them
            with contextlib.suppress(Exception):
                self._staging.reserve(size, for_cuda)
            return self._root

        self._background.start(reserve, Future())

    def save_again(
        self,
        step: int,
        content: Content,
        metrics: Mapping[str, float] | None,
        repeat: Path,
        watch: Stopwatch,
    ) -> SaveHandle:
        """Save a committed step once more, as ``repeat``; compare both and keep the sound one.

        Raises StepExists if both are sound and differ.
        """
        path = directories.step_directory(self._root, step)
        with self.reported(step, watch):
            save = self._plan(step, repeat, content, metrics)
            try:
                with self._explained(step):
                    save.write_and_commit(self._group, lambda: None)
                    self._keep_one(step, repeat)
            finally:
                save.discard()
                # without the step itself the copy is the only good one, and the next open commits it
                if self._group.rank == 0 and os.path.lexists(path):
                    shutil.rmtree(repeat, ignore_errors=True)
            self._retain(self._group, step)

        handle = SaveHandle(step)
        handle.set_result(self._committed(step, watch))
        return handle

    def finish_pending(self) -> None:
        """Wait for the background save before a new one. Not collective: its thread is."""
        error = self._background.wait()
        if error is None:
            return
        if not isinstance(error, OSError) or self._failures >= self._options.max_failures:
            raise error

    def wait(self) -> None:
        """Wait for the background save; raises what it failed with."""
        error = self._background.wait()
        if error is not None:
            raise error

    def close(self, seconds: float | None = None) -> BaseException | None:
        """Wait for the background save and release its memory; the exception of a failure that no caller knows.

        Raises TimeoutError if it still runs after ``seconds``.
        """
        last = self._background.last
        error = self._background.wait(seconds)
        if isinstance(last, SaveHandle) and last.was_read:
            error = None
        self._staging.release()
        # Its threads end with torch.distributed.destroy_process_group() if no object holds it: one that still frees a
        # tensor while Python ends would abort a process that has done all its work.
        self._writing_group = None
        return error

    def _plan(
        self, step: int, path: Path, content: Content, metrics: Mapping[str, float] | None
    ) -> PlannedSave:
        threads, digest = self._options.threads, self._options.digest
        writer = ForgeWriter(path, step=step, threads=threads, digest=digest, metrics=metrics)
        with self._explained(step):
            return plan_save(self._group, writer, content, self._plans)

    def _commit(self, group: RankGroup, save: PlannedSave, step: int, watch: Stopwatch) -> Path:
        """Write and commit a planned save, and remove what it makes outdated."""
        try:
            with self._explained(step):
                save.write_and_commit(
                    group, lambda: self.events.emit(SaveEvent("written", step, watch()))
                )
            self._retain(group, step)
        finally:
            save.discard()
        return self._committed(step, watch)

    def _committed(self, step: int, watch: Stopwatch) -> Path:
        self._failures = 0
        self.events.emit(SaveEvent("committed", step, watch()))
        return directories.step_directory(self._root, step)

    def _stage(self, save: PlannedSave) -> None:
        try:
            self._make_writing_group()
            self._group.run_on_all_ranks(lambda: save.stage(self._staging))
        except BaseException:
            save.discard()
            raise

    def _make_writing_group(self) -> None:
        if self._writing_group is None:
            self._writing_group = self._group.twin()

    def _commit_in_background(self, save: PlannedSave, step: int, watch: Stopwatch) -> Path:
        assert self._writing_group is not None
        with self.reported(step, watch):
            return self._commit(self._writing_group, save, step, watch)

    @contextlib.contextmanager
    def reported(self, step: int, watch: Stopwatch) -> Iterator[None]:
        """Count, log and report an exception as the failure of a save; a rejected argument is not one."""
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            self._failures += 1
            text = str(getattr(error, "strerror", None) or error)
            if self._group.rank == 0:
                logger.warning("%s (failed save %d in a row)", text, self._failures)
            self.events.emit(SaveEvent("failed", step, watch(), text, self._failures))
            raise

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Name the step in an OSError, and whether it was saved."""
        try:
            yield
        except OSError as error:
            reason = str(error.strerror or error)
            happened = f"step {step} was not saved in {self._root}: "
            if directories.NOT_DURABLE in reason:
                happened = f"step {step} in {self._root}: "
            text = "older checkpoints are untouched; make room or raise the limit, then save again"
            raise OSError(error.errno, f"{happened}{reason}; {text}") from error

    def _keep_one(self, step: int, repeat: Path) -> None:
        target = directories.step_directory(self._root, step)

        def compare() -> tuple[bool, str | None]:
            wanted = _content_key(repeat, step)
            try:
                return _content_key(target, step) == wanted, None
            except CorruptCheckpoint as error:
                return False, str(error)

        same, reason = self._group.run_on_rank_0(compare)
        try:
            if reason is None:
                verify_checkpoint(self._group, target, step, self._options.threads)
        except CorruptCheckpoint as error:
            reason = str(error)
        if reason is not None:
            # The committed one is damaged; the state in memory has just been written, so use that.
            self._quarantine(self._group, step, reason)
            self._group.run_on_rank_0(lambda: directories.commit(repeat, target))
        elif not same:
            rule = f"is already in {self._root} with another content, and nothing was replaced"
            fix = "save under a later step, or leave this save out"
            raise invalid("step", "exists", step, rule, fix, kind=StepExists)

    def _retain(self, group: RankGroup, step: int) -> None:
        self._retention.apply(
            group, step, self._options.threads, lambda reason: self._quarantine(group, step, reason)
        )


def _content_key(path: Path, step: int) -> tuple[Any, ...]:
    """A key that is equal for checkpoints of the same bits."""
    with ForgeReader(path, step=step).opened() as table:
        return table.content()
