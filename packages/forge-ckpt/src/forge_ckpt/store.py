"""The store: a directory of verified checkpoints of one run, written by one job at a time."""

import logging
import os
import secrets
from collections.abc import Callable, Collection, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from forge_ckpt import generations, manifest
from forge_ckpt.errors import CheckpointMismatch, CorruptCheckpoint, StateRefused, StepExists
from forge_ckpt.foreign import refuse_foreign
from forge_ckpt.lock import Lock, refuse_another_directory
from forge_ckpt.ranks import Ranks
from forge_ckpt.read.reader import ForgeReader
from forge_ckpt.read.targets import named, state_of
from forge_ckpt.read.together import Check, read_together, verify_together
from forge_ckpt.write.together import write_together

logger = logging.getLogger("forge_ckpt")


class Store:
    """Checkpoints ``step-00000100``, ... below ``path``; the newest ``keep_last`` are kept.

    Usage::

        store = Store("runs/a/checkpoints", keep_last=3)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = store.load(state) or 0
        store.save(step, state)
        store.close()

    ``state`` maps names to objects with ``state_dict()`` and ``load_state_dict()``, or to nested
    dicts, lists, tuples, tensors and plain values.

    In a process group of several ranks (``group``, else the default one) every rank makes the store
    and calls every method but ``close`` in the same order, and all get the same result or the same
    class of exception. ``path`` is a directory that all see. Rank 0 holds the lock, decides and
    commits. A rank that dies makes the others raise RuntimeError; what was committed loads.
    Where the default group is NCCL alone, a gloo group of all ranks is made.

    Opening for writing makes the directory, takes its lock (StoreInUse) and removes what dead
    writers left. ``read_only=True`` changes nothing on disk and needs no lock. Raises ValueError
    for a path that cannot be such a directory.

    ``set_aside`` lists (step, reason) of each checkpoint that this store found corrupt, on every
    rank, for a caller that keeps a journal; a warning, once for the job, says the same.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep_last: int = 3,
        read_only: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.path = Path(path)
        if type(keep_last) is not int or keep_last < 1:
            raise ValueError(f"keep_last {keep_last!r} must be an integer of at least 1; use 3")
        self.keep_last = keep_last
        self.read_only = read_only
        self.set_aside: list[tuple[int, str]] = []
        self._ranks = Ranks(group)
        self._threads = min(4, os.cpu_count() or 1)
        self._lock: Lock | None = None
        self._closed = False
        try:
            owner = self._ranks.first_does(self._open)
            self._ranks.all_do(lambda: refuse_another_directory(self.path, owner))
        except BaseException:
            self.close()
            raise

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write ``state`` as the newest checkpoint; when this returns it is durable.

        Before an old checkpoint is removed, the new one is read back and compared (one more read,
        shared by the ranks).

        A step that is already committed with the same content, saved on the same number of ranks,
        is done (both are verified); with another content it raises StepExists. A step below the
        newest one raises ValueError. A full disk or a size limit, of any rank, raises OSError. In
        every case the older checkpoints stay as they are.
        """
        again = self._ranks.through_first(
            lambda: self._checked(step, state), lambda steps: self._may_save(steps)
        )
        target = generations.directory_of(self.path, step)

        def content() -> dict[str, Any]:
            return {name: state_of(value) for name, value in named(state).items()}

        if again is not None:
            self._save_again(step, content, target, self.path / again)
        else:
            self._write(step, content, target)
        old = self._ranks.first_does(lambda: self._committed(step))
        if old:
            self._retain(step, old)

    def load(self, state: MutableMapping[str, Any], check: Check | None = None) -> int | None:
        """Fill ``state`` from the newest sound checkpoint; returns its step, None if there is none.

        Everything that ``state`` names is verified, on every rank, before the first tensor of any
        rank changes. A corrupt checkpoint is moved to ``quarantine/`` with one warning (not with
        ``read_only``), and the next older one is tried, by all ranks. Raises CorruptCheckpoint
        naming all when none is sound, and CheckpointMismatch, with ``state`` untouched on all
        ranks, when the newest sound one is of another state on any.

        A checkpoint that an object cannot use is corrupt too: where its ``load_checks(saved)``
        or ``check(step, saved)`` (``saved``: names to states; tensors that are filled in place hold
        their old values) raises a plain ValueError, before anything changes. Where a
        ``load_state_dict`` raises a built-in exception, the next older checkpoint is loaded over
        what changed; if it raises as well, the fault is taken to be the object's: nothing moves,
        and the first exception is raised. Exceptions of other classes are raised at once.
        """

        def ready() -> None:
            self._require_open(writing=False)
            named(state)

        self._ranks.all_do(ready)
        corrupt: dict[int, str] = {}
        # At most one: set aside only once an older one has loaded, since an object that refuses two in
        # a row is more likely wrong itself (its code changed) than both of them are.
        refused: dict[int, StateRefused] = {}
        while (
            step := self._ranks.first_does(lambda: self._newest_but({*corrupt, *refused}))
        ) is not None:
            try:
                self._read(step, state, check)
            except CorruptCheckpoint as error:
                if self._put_aside(step, str(error)):
                    corrupt[step] = str(error)
                continue
            except (StateRefused, CheckpointMismatch) as error:
                if refused:
                    break
                if not isinstance(error, StateRefused):
                    raise
                refused[step] = error
                continue
            for newer, reason in refused.items():
                self._put_aside(newer, str(reason))
            return step
        for reason in refused.values():
            self._raise_cause(reason)
        found = list(corrupt.values()) or self._ranks.first_does(self._earlier)
        if found:
            raise CorruptCheckpoint(
                f"no sound checkpoint in {self.path}; restore one from a copy, or start over in "
                "another directory\n  " + "\n  ".join(found)
            )
        return None

    def steps(self) -> list[int]:
        """Committed steps, oldest first. Committed, not verified: no data is read."""

        def found() -> list[int]:
            self._require_open(writing=False)
            return generations.committed_steps(self.path)

        return self._ranks.first_does(found)

    def verify(self, step: int) -> None:
        """Read all of a checkpoint and compare it with its digests; raises CorruptCheckpoint.

        Ranks share the files.
        """
        self._ranks.all_do(lambda: self._require_open(writing=False))
        self._verify(step)

    def inspect(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds, from its manifest alone: plain data, JSON if one likes.

        ``{"step", "torch", "bytes", "files": {name: bytes}, "tensors": {name: {"shape", "dtype",
        "bytes"}}, "objects": [names]}``; ``bytes`` of tied tensors count for each name, the total
        counts what is on disk. Raises CorruptCheckpoint.
        """

        def look() -> dict[str, Any]:
            self._require_open(writing=False)
            target = generations.directory_of(self.path, step)
            with ForgeReader(target, step=step).opened() as table:
                return manifest.summary(table)

        return self._ranks.first_does(look)

    def close(self) -> None:
        """Release the lock; a second call does nothing. Ranks need not wait for each other."""
        if self._lock is not None:
            self._lock.release()
        self._closed = True

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- opening

    def _open(self) -> str | None:
        """Rank 0: make and lock the directory; returns what the lock's file says (None: no lock)."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"{self.path} is a file; a store needs a directory, choose another path"
            )
        refuse_foreign(self.path)
        if self.read_only:
            if not self.path.is_dir():
                raise ValueError(f"{self.path} does not exist; check the path of the run")
            return None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path)
            left = generations.remove_left_overs(self.path) if self._lock.held else []
            generations.refuse_unwritable(self.path)
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be written ({error.strerror}: {error.filename}); choose a "
                "writable directory, or open it with read_only=True"
            ) from error
        if left:
            logger.info("%s: removed unfinished %s", self.path, ", ".join(left))
        return self._lock.owner

    def _require_open(self, *, writing: bool) -> None:
        if self._closed:
            raise ValueError(f"the store {self.path} is closed; open it again")
        if writing and self.read_only:
            raise ValueError(
                f"the store {self.path} was opened with read_only=True; open it to write"
            )

    # ---- saving

    def _checked(self, step: int, state: Mapping[str, Any]) -> int:
        self._require_open(writing=True)
        if type(step) is not int or not 0 <= step < 10**18:
            raise ValueError(f"step {step!r} must be an integer of at least 0")
        named(state)
        return step

    def _may_save(self, steps: list[int]) -> str | None:
        """Rank 0: None, or where to write a step that is there already, beside it."""
        step = steps[0]
        if set(steps) != {step}:
            raise ValueError(f"ranks save steps {steps}; all must save the same one")
        assert self._lock is not None
        self._lock.refuse_moved()
        newest = max(generations.committed_steps(self.path), default=-1)
        if step < newest:
            raise ValueError(
                f"step {step} is before step {newest}, the newest in {self.path}, which the next load "
                "would take; load it first, or use another directory"
            )
        target = generations.directory_of(self.path, step)
        if os.path.lexists(target):
            return f"{target.name}.tmp-again-{secrets.token_hex(4)}"
        return None

    def _write(self, step: int, content: Callable[[], dict[str, Any]], target: Path) -> None:
        try:
            write_together(self._ranks, target, step, content, self._threads)
        except OSError as error:
            raise OSError(
                error.errno,
                f"step {step} was not saved in {self.path}: {error.strerror}; older checkpoints are "
                "untouched; make room or raise the limit, then save again",
            ) from error

    def _save_again(
        self, step: int, content: Callable[[], dict[str, Any]], target: Path, again: Path
    ) -> None:
        """The step is there: write beside it, compare, and keep the sound one."""

        def compare() -> tuple[bool, str | None]:
            wanted = _content(again, step)
            try:
                return _content(target, step) == wanted, None
            except CorruptCheckpoint as error:
                return False, str(error)

        self._write(step, content, again)
        try:
            same, reason = self._ranks.first_does(compare)
            try:
                if reason is None:
                    self._verify(step)
            except CorruptCheckpoint as error:
                reason = str(error)
            if reason is not None:
                self._put_aside(step, reason)
                self._ranks.first_does(lambda: generations.commit(again, target))
            elif not same:
                raise StepExists(
                    f"step {step} is already in {self.path} with another content; nothing was "
                    "replaced: save under a later step, or leave this save out"
                )
        finally:
            if self._ranks.rank == 0 and again.exists():
                generations.remove(again)

    def _committed(self, step: int) -> list[int]:
        """Rank 0: look at the new checkpoint as it is on the disk; returns the steps that are too old."""
        with ForgeReader(generations.directory_of(self.path, step), step=step).opened():
            return generations.committed_steps(self.path)[: -self.keep_last]

    def _retain(self, step: int, old: list[int]) -> None:
        """Drop ``old``, once ``step``, the newest, has been read back and compared."""
        try:
            self._verify(step)
        except CorruptCheckpoint as error:
            self._put_aside(step, str(error))
            raise CorruptCheckpoint(
                f"{error}; it was written a moment ago: disk or memory fail. Older checkpoints are kept"
            ) from error
        self._ranks.first_does(lambda: self._remove(old))

    def _remove(self, old: list[int]) -> None:
        for step in old:
            try:
                generations.remove(generations.directory_of(self.path, step))
            except OSError as error:
                logger.warning("step %d could not be removed: %s", step, error)

    # ---- loading

    def _read(self, step: int, state: MutableMapping[str, Any], check: Check | None) -> None:
        path = generations.directory_of(self.path, step)
        try:
            read_together(self._ranks, path, step, state, self._threads, check)
        except PermissionError as error:
            raise PermissionError(
                error.errno,
                f"step {step} cannot be read: {error.strerror}; make it readable, or move it away to "
                "go on from an older one",
                error.filename,
            ) from error

    def _raise_cause(self, refused: StateRefused) -> None:
        """What a ``load_state_dict`` raised, on the ranks where it did; its relative elsewhere."""

        def again() -> None:
            cause: BaseException | None = refused
            while isinstance(cause, StateRefused):
                cause = cause.__cause__
            if cause is not None:
                cause.add_note(f"{refused}; no older checkpoint could be used, and none was moved")
                raise cause

        self._ranks.all_do(again)

    def _verify(self, step: int) -> None:
        path = generations.directory_of(self.path, step)
        verify_together(self._ranks, path, step, self._threads)

    def _newest_but(self, corrupt: Collection[int]) -> int | None:
        # listed anew each time: beside a writer, steps come and go while we read
        left = [step for step in generations.found_steps(self.path) if step not in corrupt]
        return max(left, default=None)

    def _earlier(self) -> list[str]:
        return [
            f"{self.path / generations.QUARANTINE / name}: found corrupt earlier"
            for name in generations.quarantined(self.path)
        ]

    def _put_aside(self, step: int, reason: str) -> bool:
        """Quarantine a step, all ranks together; False if it is gone, by the writer's retention."""

        def move() -> bool:
            if not os.path.lexists(generations.directory_of(self.path, step)):
                return False
            if self.read_only:
                logger.warning("step %d is corrupt, trying an older one: %s", step, reason)
            else:
                try:
                    place = generations.quarantine(self.path, step)
                except OSError as error:
                    text = f"step {step} is corrupt ({reason}) and cannot be set aside: "
                    raise OSError(error.errno, f"{text}{error.strerror}", error.filename) from error
                logger.warning("step %d is corrupt, moved to %s: %s", step, place, reason)
            return True

        found: bool = self._ranks.first_does(move)
        if found:
            self.set_aside.append((step, reason))
        return found


def _content(path: Path, step: int) -> tuple[Any, ...]:
    with ForgeReader(path, step=step).opened() as table:
        return table.content()
