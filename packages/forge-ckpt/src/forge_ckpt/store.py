"""The store: a directory of verified checkpoints of one run, with one writing job at a time."""

import functools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from forge_ckpt import codec, directories, manifest
from forge_ckpt._shared.paths import user_path
from forge_ckpt._shared.problems import Problem, invalid
from forge_ckpt.directories import Lock, refuse_another_directory, refuse_foreign
from forge_ckpt.errors import CheckpointMismatch, CorruptCheckpoint, StateRefused
from forge_ckpt.rank_group import RankGroup
from forge_ckpt.read.load import Check, load_checkpoint, raise_cause, verify_checkpoint
from forge_ckpt.read.planner import check_state, state_of
from forge_ckpt.retention import Keep, Retention
from forge_ckpt.write.background import END_SECONDS, SaveEvent, SaveHandle
from forge_ckpt.write.saver import Saver, SaverOptions

logger = logging.getLogger("forge_ckpt")
P = ParamSpec("P")
T = TypeVar("T")


def _one_at_a_time(
    method: "Callable[Concatenate[Store, P], T]",
) -> "Callable[Concatenate[Store, P], T]":
    """A method of Store that waits for those of other threads, which use the same staging memory."""

    @functools.wraps(method)
    def call(store: "Store", /, *args: P.args, **kwargs: P.kwargs) -> T:
        if os.getpid() != store._pid:
            rule = f"was opened by process {store._pid}, from which this one was forked"
            raise invalid("store", "forked", str(store.path), rule, "open a store in this process")
        with store._calls:
            return method(store, *args, **kwargs)

    return call


class Store:
    """Checkpoints ``step-00000100``, ... below ``path``; the newest ``keep_last`` are kept.

    Usage::

        store = Store("runs/a/checkpoints", keep_last=3)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = store.load(state) or 0
        store.save(step, state, wait=False)
        store.close()

    ``state`` maps names to objects with ``state_dict()`` and ``load_state_dict()``, or to nested
    dicts, lists, tuples, tensors and plain values.

    In a process group of several ranks (``group``, else the default one) every rank makes the store
    and calls every method but ``close`` in the same order, and all get the same result or the same
    class of exception. ``path`` is a directory on a file system that all ranks share. Rank 0 holds
    the lock, decides and commits. If a rank dies, the others raise RuntimeError; committed steps
    still load. Where the default group is NCCL alone, a gloo group of all ranks is made.

    Calls of several threads run one after the other; in a group of ranks only one thread may call, as
    the order must be the same on all of them. A forked child has no lock, and must open a store of its own.

    Opening for writing makes the directory, takes its lock (StoreInUse) and removes the temporary
    directories of dead writers (on a file system without locks they stay: their writer may be alive). ``read_only=True`` changes nothing on disk and takes no lock. Raises
    ValueError for a path that cannot be such a directory.

    ``keep``: a :class:`forge_ckpt.Keep` for other rules than ``keep_last``. ``digest``: "sha256", or
    "blake3", which is faster and needs the extra ``[fast]``.

    Of saves that are not waited for: ``staging_gib`` bounds the host memory of a rank for them (None: as
    much as it saves). ``on_event(SaveEvent)`` is called when a save is staged, written, committed or
    failed, on every rank, mostly in the thread that writes. Those that fail with an OSError are warned
    of and made good by the next save; the ``max_failures``-th in a row raises at the next call.

    ``quarantined`` lists (step, reason) of each checkpoint that this store found corrupt, on every
    rank, for the journal of a caller; rank 0 also logs a warning for each.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep_last: int = 3,
        read_only: bool = False,
        group: dist.ProcessGroup | None = None,
        *,
        keep: Keep | None = None,
        digest: str = codec.DEFAULT_DIGEST,
        staging_gib: float | None = None,
        on_event: Callable[[SaveEvent], None] | None = None,
        max_failures: int = 3,
    ) -> None:
        self.path = user_path(path)
        if type(keep_last) is not int or keep_last < 1:
            rule = "must be an integer of at least 1"
            raise invalid("keep_last", "range", keep_last, rule, "use 3")
        codec.digest_function(digest)
        threads = min(4, os.cpu_count() or 1)
        options = SaverOptions(digest, staging_gib, on_event, max_failures, threads)
        self.keep = Keep(keep_last) if keep is None else keep
        self.read_only = read_only
        # All ranks act on them, and rank 0's decide: they must be the same.
        settings = {"read_only": read_only, "digest": digest, "max_failures": max_failures}
        settings["keep"] = self.keep.described()
        self.quarantined: list[tuple[int, str]] = []
        self._group = RankGroup(group)
        self._threads = threads

        retention = Retention(self.path, self.keep)
        self._saver = Saver(self._group, self.path, retention, self._quarantine, options)
        self._lock: Lock | None = None
        self._closed = False
        self._calls, self._pid = threading.RLock(), os.getpid()

        try:
            first = self._group.run_on_rank_0(lambda: {**settings, "owner": self._open()})
            self._group.run_on_all_ranks(lambda: self._check_alike(settings, first))
        except BaseException:
            self.close()
            raise

    @_one_at_a_time
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        wait: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Write ``state`` as the newest checkpoint; it is durable when this returns.

        With ``wait=False`` it returns when the state is copied to host memory and may change; a thread
        writes and commits it, and the :class:`forge_ckpt.SaveHandle` that is returned has ``done()`` and
        ``result()``. A save waits for the one before it. ``metrics`` (of rank 0) are numbers of
        this step by which ``keep`` can find the best.

        Before an old checkpoint is removed, the new one is read back and compared (one more read,
        shared by the ranks).

        A step that is already committed with the same content, from the same number of ranks, is
        verified and left; with another content it raises StepExists. A step below the newest one
        raises ValueError. A full disk or a size limit, of any rank, raises OSError (with
        ``wait=False``: see ``max_failures``). In each of these cases the older checkpoints do not change.
        """
        self._saver.finish_pending()
        started = time.perf_counter()
        with self._saver.reported(step, started):
            again: bool = self._group.map_reduce(
                lambda: self._check_save(step, state, wait, metrics), self._plan_save
            )

        content = functools.partial(_saved_form, state)
        return self._saver.save(step, content, metrics, wait, started, again)

    @_one_at_a_time
    def prepare(self, state: Mapping[str, Any]) -> None:
        """Get ready for saves of ``state`` with ``wait=False``: without it the first one does this.

        Plans them, raises ValueError if they need more than ``staging_gib``, and takes their host memory in
        the background: fresh or pinned memory takes longer than the copy (a GB a second or less). A disk that
        would refuse them is a warning.
        """
        self._saver.finish_pending()
        self._group.run_on_all_ranks(lambda: self._require_open(writing=True))
        self._saver.prepare(lambda: _saved_form(state))

    def poll(self) -> list[SaveEvent]:
        """What became of saves since the last call; returns at once, no communication."""
        return self._saver.events.take()

    @_one_at_a_time
    def wait(self) -> None:
        """Wait until the last save is committed; raises what it failed with. No communication of its own."""
        self._saver.wait()

    @_one_at_a_time
    def load(
        self,
        state: MutableMapping[str, Any],
        check: Check | None = None,
        *,
        newest: int | None = None,
        quarantine: bool = True,
    ) -> int | None:
        """Fill ``state`` from the newest sound checkpoint; returns its step, None without a checkpoint.

        The newest is the largest step number, and the load goes down from there. With ``newest`` it begins there: later
        steps do not count, and the result is None if all are later (see ``discard_after``). With ``quarantine=False`` (rank
        0 decides) nothing on disk is moved: a corrupt checkpoint is named in a warning, in ``quarantined`` and, if none is
        sound, in the exception, and stays where it is; a save of an earlier step then raises ValueError.

        Every entry of ``state`` is verified, on every rank, before the first tensor of any rank
        changes; a file that changes after that is verified again when it is read
        (:class:`forge_ckpt.ForgeReader`), and found damaged counts as corrupt. A corrupt checkpoint is moved to ``quarantine/`` with one warning (not with
        ``read_only`` or ``quarantine=False``), and all ranks try the next older one. Raises CorruptCheckpoint naming all when
        none is sound, and CheckpointMismatch when the newest sound one is of another state on any rank; with
        ``state`` unchanged on all ranks, unless a file was damaged between its verification and its read.
        Raises OSError for a fault of a host, such as EACCES or EMFILE; the checkpoint stays where it is. If ranks fail in
        different ways, the class of the lowest failed rank decides.

        A checkpoint that an object cannot use is corrupt too: its ``load_checks(saved)`` or
        ``check(step, saved)`` raises a plain ValueError, before anything changes (``saved`` maps names
        to states; tensors that are filled in place still hold their old values). If a
        ``load_state_dict`` raises a built-in exception, the next older checkpoint is loaded over the
        partly changed state; if that raises as well, the object is at fault: nothing is moved, and the
        first exception is raised. Exceptions of other classes are raised at once.
        """

        def ready() -> None:
            self._require_open(writing=False)
            check_state(state)

        self._saver.finish_pending()
        self._group.run_on_all_ranks(ready)
        corrupt: dict[int, CorruptCheckpoint] = {}
        # At most one. It is quarantined only after an older one has loaded: if an object refuses two in
        # a row, its code is more likely wrong than both checkpoints.
        refused: dict[int, StateRefused] = {}
        # Rank 0 picks the step and sends it: a listing of its own could differ on each rank.
        # Listed each time: a writer may add and remove steps during a read-only load.
        while (
            step := self._group.run_on_rank_0(
                lambda: directories.newest_step(self.path, newest, {*corrupt, *refused})
            )
        ) is not None:
            try:
                self._read(step, state, check)
            except CorruptCheckpoint as error:
                if self._quarantine(self._group, step, str(error), quarantine):
                    corrupt[step] = error
                continue

            except (StateRefused, CheckpointMismatch) as error:
                if refused:
                    break
                if not isinstance(error, StateRefused):
                    raise
                refused[step] = error
                continue
            for newer, reason in refused.items():
                self._quarantine(self._group, newer, str(reason), quarantine)
            return step

        for reason in refused.values():
            raise_cause(
                self._group, reason, "; no older checkpoint could be used, and none was moved"
            )
        found = [replace(p, origin=e.where) for e in corrupt.values() for p in e.problems]
        if not found:
            earlier = self._group.run_on_rank_0(lambda: directories.quarantined(self.path, newest))
            rule = "was found corrupt earlier"
            found = [Problem("quarantine", "earlier", name, rule) for name in earlier]
        if found:
            rule = "holds no sound checkpoint" + ("" if newest is None else f" up to step {newest}")
            fix = "restore one from a copy, or start over in another directory"
            header = Problem("path", "corrupt", str(self.path), rule, fix)
            raise CorruptCheckpoint([header, *found])
        return None

    @property
    def set_aside(self) -> list[tuple[int, str]]:  # language: old name
        """The name of `quarantined` in 0.1, found until 0.3.0."""
        text = "set_aside is quarantined now"  # language: old name
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.quarantined

    def steps(self) -> list[int]:
        """Committed steps, oldest first, also of a closed store. They are not verified: no data is read."""
        return self._group.run_on_rank_0(lambda: directories.committed_steps(self.path))

    @_one_at_a_time
    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints after ``step``, sound or not, the newest first, and return their steps.

        For a run that goes back: load with ``newest=step`` first, so that a sound one is known to be left.
        Raises ValueError if ``step`` is not committed, and OSError where one cannot be removed.
        """
        self._saver.finish_pending()

        def remove() -> list[int]:
            self._require_open(writing=True)
            steps = directories.committed_steps(self.path)
            if step not in steps:
                rule = f"is not in {self.path}, so nothing would be left to go on from"
                raise invalid("step", "not_found", step, rule, f"use one of {steps}")
            # also those without a manifest: they would be the newest, and the next save is below them
            newer = [s for s in reversed(directories.list_steps(self.path)) if s > step]
            for other in newer:
                directories.remove_step(directories.step_directory(self.path, other))
            return newer

        return self._group.run_on_rank_0(remove)

    @_one_at_a_time
    def verify(self, step: int) -> None:
        """Read a whole checkpoint and compare it with its digests; raises CorruptCheckpoint.

        The files are divided among the ranks. Waits for the save in the background, which may remove ``step``.
        """
        self._saver.finish_pending()
        self._group.run_on_all_ranks(lambda: self._require_open(writing=False))
        path = directories.step_directory(self.path, step)
        verify_checkpoint(self._group, path, step, self._threads)

    @_one_at_a_time
    def inspect(self, step: int) -> dict[str, Any]:
        """The content of a checkpoint by its manifest alone, as plain data that JSON can hold.

        ``{"step", "torch", "bytes", "files": {name: bytes}, "tensors": {name: {"shape", "dtype",
        "bytes"}}, "objects": [names]}``; ``bytes`` of tied tensors count for each name; the total
        is the size on disk. Waits for the save in the background. Raises CorruptCheckpoint.
        """
        self._saver.finish_pending()

        def look() -> dict[str, Any]:
            self._require_open(writing=False)
            target = directories.step_directory(self.path, step)
            return manifest.summary(manifest.read_from(target, step))

        return self._group.run_on_rank_0(look)

    def close(self) -> None:
        """Wait for the last save, release the lock and the staging memory; a second call does nothing.

        Raises what the last save failed with, unless a caller knows it. No communication of its own.
        """
        error = self._close()
        if error is not None:
            raise error

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            # A failure of the last save was logged; the error of the block matters more. It may be that of
            # a rank that hangs, for which the save waits too.
            try:
                self._close(END_SECONDS)
            except TimeoutError as late:
                logger.warning("%s: %s; it is left, and the lock with it", self.path, late)

    def _close(self, seconds: float | None = None) -> BaseException | None:
        """``close``, but returns the exception; TimeoutError if calls or the save last longer than ``seconds``."""
        if not self._calls.acquire(timeout=-1 if seconds is None else seconds):
            raise TimeoutError(f"another thread still uses the store after {seconds} seconds")
        try:
            error = self._saver.close(seconds)
        finally:
            self._calls.release()
        if self._lock is not None:
            self._lock.release()
        self._closed = True
        return error

    # ---- opening

    def _open(self) -> str | None:
        """Rank 0: make and lock the directory; returns the content of the lock file (None: no lock)."""
        if self.path.exists() and not self.path.is_dir():
            rule = "is a file, and a store needs a directory"
            raise invalid("path", "file", str(self.path), rule, "choose another path")
        refuse_foreign(self.path)
        if self.read_only:
            if not self.path.is_dir():
                fix = "check the path of the run"
                raise invalid("path", "not_found", str(self.path), "does not exist", fix)
            return None
        try:
            directories.make_directory(self.path)
            self._lock = Lock(self.path)
            # Only under the lock are they certainly left by a dead writer, and not being written.
            removed = directories.remove_temporary(self.path) if self._lock.held else []
            directories.check_writable(self.path)
        except OSError as error:
            rule = f"cannot be written ({error.strerror}: {error.filename})"
            fix = "choose a writable directory, or open it with read_only=True"
            raise invalid("path", "not_writable", str(self.path), rule, fix) from error
        if removed:
            logger.info("%s: removed unfinished %s", self.path, ", ".join(removed))
        return self._lock.owner

    def _check_alike(self, settings: dict[str, Any], first: dict[str, Any]) -> None:
        """Raise ValueError if a setting, or the directory, is not that of rank 0, the ``first``."""
        for key, value in settings.items():
            if value != first[key]:
                rule = f"must be the same on all ranks, and is {first[key]!r} on rank 0"
                raise invalid(key, "mismatch", value, rule)
        refuse_another_directory(self.path, first["owner"])

    def _require_open(self, *, writing: bool) -> None:
        if self._closed:
            raise invalid("store", "closed", str(self.path), "is closed", "open it again")
        if writing and self.read_only:
            rule = "was opened with read_only=True"
            raise invalid("store", "read_only", str(self.path), rule, "open it to write")

    # ---- saving

    def _check_save(
        self, step: int, state: Mapping[str, Any], wait: bool, metrics: Mapping[str, float] | None
    ) -> list[Any]:
        """Check the arguments of a save; returns those that all ranks must agree on."""
        self._require_open(writing=True)
        if type(step) is not int or not 0 <= step < 10**18:
            raise invalid("step", "range", step, "must be an integer of at least 0")
        check_state(state)
        manifest.check_metrics(metrics or {})
        return [step, bool(wait)]

    def _plan_save(self, calls: list[list[Any]]) -> bool:
        """Rank 0: whether the step is committed, and is saved again."""
        steps = [step for step, _ in calls]
        step = steps[0]
        if set(steps) != {step}:
            raise invalid("step", "mismatch", steps, "must be the same on all ranks")
        if len({wait for _, wait in calls}) > 1:
            rule = f"differs between the ranks that save step {step}"
            raise invalid("wait", "mismatch", [wait for _, wait in calls], rule, "agree on one")

        assert self._lock is not None
        self._lock.refuse_moved()
        newest = directories.newest_step(self.path)
        if newest is not None and step < newest:
            rule = f"is before step {newest}, the newest in {self.path}, which the next load would take"
            fix = "load it first, or use another directory"
            raise invalid("step", "order", step, rule, fix)
        return os.path.lexists(directories.step_directory(self.path, step))

    # ---- loading

    def _read(self, step: int, state: MutableMapping[str, Any], check: Check | None) -> None:
        """Load one step; a PermissionError says which step and what to do."""
        path = directories.step_directory(self.path, step)
        try:
            load_checkpoint(self._group, path, step, state, self._threads, check)
        except PermissionError as error:
            fix = "make it readable, or move it away to go on from an older one"
            text = f"step {step} cannot be read: {error.strerror}; {fix}"
            raise PermissionError(error.errno, text, error.filename) from error

    def _quarantine(self, group: RankGroup, step: int, reason: str, may_move: bool = True) -> bool:
        """Quarantine a step, called by all ranks; False if the writer's retention has removed it."""

        def move() -> bool:
            if not os.path.lexists(directories.step_directory(self.path, step)):
                return False
            if self.read_only or not may_move:
                logger.warning("step %d is corrupt, trying an older one: %s", step, reason)
            else:
                try:
                    target = directories.quarantine(self.path, step)
                except OSError as error:
                    text = f"step {step} is corrupt ({reason}) and cannot be quarantined: "
                    raise OSError(error.errno, f"{text}{error.strerror}", error.filename) from error
                logger.warning("step %d is corrupt, moved to %s: %s", step, target, reason)
            return True

        existed: bool = group.run_on_rank_0(move)
        if existed:
            self.quarantined.append((step, reason))
        return existed


def _saved_form(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved of each entry: its state dict, or itself."""
    return {name: state_of(value) for name, value in check_state(state).items()}
