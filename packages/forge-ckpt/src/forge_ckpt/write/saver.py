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

from forge_ckpt import directories, manifest
from forge_ckpt._shared.problems import invalid
from forge_ckpt.errors import CorruptCheckpoint, StepExists
from forge_ckpt.rank_group import RankGroup
from forge_ckpt.read.load import verify_checkpoint
from forge_ckpt.retention import Retention
from forge_ckpt.write.background import BackgroundWriter, SaveEvent, SaveEvents, SaveHandle
from forge_ckpt.write.save import PlannedSave, SavePlans, plan_save
from forge_ckpt.write.staging import StagingArea
from forge_ckpt.write.writer import ForgeWriter

logger = logging.getLogger("forge_ckpt")
Content = Callable[[], dict[str, Any]]
Metrics = Mapping[str, float] | None
# (group, step, reason) -> whether the step was there. Given by the store, as it lists what is quarantined.
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
        # For the background thread, as exchanges of two threads on one group would mix.
        self._writing_group: RankGroup | None = None
        self._root, self._retention, self._quarantine = root, retention, quarantine
        self._options = options
        self._failures = 0  # in a row; the same on all ranks, so that all raise at the same save
        self._background = BackgroundWriter()
        self._plans = SavePlans()
        self._staging = StagingArea(options.staging_gib)

    def save(
        self, step: int, content: Content, metrics: Metrics, wait: bool, started: float, again: bool
    ) -> SaveHandle:
        """Save a step; returns when it is committed, or staged without ``wait``.

        A step that is committed is saved ``again``: the call waits, compares both and keeps the sound one. Raises StepExists
        if both are sound and differ.
        """
        handle, wait = SaveHandle(step), wait or again
        try:
            with self.reported(step, started):
                path = directories.step_directory(self._root, step)
                save = self._plan(
                    step, directories.second_copy(path) if again else path, content, metrics
                )
                if wait:
                    handle.set_result(self._commit(self._group, save, step, started))
                else:
                    with self._explained(step):
                        self._stage(save)
        except OSError as error:
            if wait or self._failures >= self._options.max_failures:
                raise
            # A full disk is left to the next save; wait and close raise its error if there is no next save.
            self._background.fail(handle, error)
            return handle

        def write_in_background() -> Path:
            assert self._writing_group is not None
            with self.reported(step, started):
                return self._commit(self._writing_group, save, step, started)

        if not wait:
            self.events.emit("staged", step, started)
            self._background.start(write_in_background, handle)
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
            # an error of one rank; the save meets it again, and then all ranks learn of it
            with contextlib.suppress(Exception):
                self._staging.reserve(size, for_cuda)
            return self._root

        self._background.start(reserve, Future())

    def finish_pending(self) -> None:
        """Wait for the background save before a new one. Not collective: its thread is."""
        error = self._background.wait()
        left = isinstance(error, OSError) and self._failures < self._options.max_failures
        if error is not None and not left:
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

    def _plan(self, step: int, path: Path, content: Content, metrics: Metrics) -> PlannedSave:
        threads, digest = self._options.threads, self._options.digest
        writer = ForgeWriter(path, step=step, threads=threads, digest=digest, metrics=metrics)
        with self._explained(step):
            return plan_save(self._group, writer, content, self._plans)

    def _commit(self, group: RankGroup, save: PlannedSave, step: int, started: float) -> Path:
        """Write and commit a planned save, and remove what it makes outdated.

        A rename commits. The event "committed" follows the removals: a kill in between leaves a committed step without one.
        """
        target, written = directories.step_directory(self._root, step), save.writer.path
        again = written != target

        def report() -> None:
            if not again:
                self.events.emit("written", step, started)

        try:
            with self._explained(step):
                save.write_and_commit(group, report)
                if again:
                    self._keep_one(step, target, written)
            self._retention.apply(
                group, step, self._options.threads, lambda text: self._quarantine(group, step, text)
            )
        finally:
            save.discard()
            # without the step itself the second copy is the only good one, and the next open commits it
            if again and group.rank == 0 and os.path.lexists(target):
                shutil.rmtree(written, ignore_errors=True)
        self._failures = 0
        self.events.emit("committed", step, started)
        return target

    def _stage(self, save: PlannedSave) -> None:
        """Copy the state to host memory, for the background thread."""
        try:
            self._make_writing_group()
            self._group.run_on_all_ranks(lambda: save.stage(self._staging))
        except BaseException:
            save.discard()
            raise

    def _make_writing_group(self) -> None:
        if self._writing_group is None:
            self._writing_group = self._group.twin()

    @contextlib.contextmanager
    def reported(self, step: int, started: float) -> Iterator[None]:
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
            self.events.emit("failed", step, started, text, self._failures)
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

    def _keep_one(self, step: int, target: Path, repeat: Path) -> None:
        """Compare the committed step with ``repeat``, which replaces it if it is damaged."""

        def compare() -> tuple[bool, str | None]:
            wanted = manifest.read_from(repeat, step).content()
            try:
                return manifest.read_from(target, step).content() == wanted, None
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
