"""The store: a directory of verified checkpoints of one run, written by one process at a time."""

import logging
import os
import secrets
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from forge_ckpt import generations, manifest
from forge_ckpt.errors import CheckpointMismatch, CorruptCheckpoint, StepExists
from forge_ckpt.files import Directory, sync_directory
from forge_ckpt.lock import Lock
from forge_ckpt.read.blocks import verify_all
from forge_ckpt.read.planner import ForgeLoadPlanner
from forge_ckpt.read.reader import ForgeReader
from forge_ckpt.write.planner import ForgeSavePlanner
from forge_ckpt.write.writer import ForgeWriter

logger = logging.getLogger("forge_ckpt")
T = TypeVar("T")


class Store:
    """Checkpoints ``step-00000100``, ... below ``path``; the newest ``keep_last`` are kept.

    Usage::

        store = Store("runs/a/checkpoints", keep_last=3)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = store.load(state) or 0
        store.save(step, state)
        store.close()

    ``state`` maps names to objects with ``state_dict()`` and ``load_state_dict()``, or to nested
    dicts, lists, tuples, tensors and plain values. One process: with a larger process group it
    raises ValueError (ForgeWriter and ForgeReader work there through torch's dcp).

    Opening for writing makes the directory, takes its lock (StoreInUse) and removes what dead
    writers left. ``read_only=True`` changes nothing on disk and needs no lock. Raises ValueError
    for a path that cannot be such a directory.
    """

    def __init__(
        self, path: str | os.PathLike[str], keep_last: int = 3, read_only: bool = False
    ) -> None:
        self.path = Path(path)
        if type(keep_last) is not int or keep_last < 1:
            raise ValueError(f"keep_last {keep_last!r} must be an integer of at least 1; use 3")
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"Store serves one process and the group has {dist.get_world_size()}; use "
                "ForgeWriter and ForgeReader with torch.distributed.checkpoint"
            )
        self.keep_last = keep_last
        self.read_only = read_only
        self._threads = min(4, os.cpu_count() or 1)
        self._lock: Lock | None = None
        self._closed = False
        self._open()

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write ``state`` as the newest checkpoint; when this returns it is durable.

        Before an old checkpoint is removed, the new one is read back and compared (one more read).

        A step that is already committed with the same content is done (both are verified); with
        another content it raises StepExists. A step below the newest one raises ValueError. A full
        disk or a size limit raises OSError. In every case the older checkpoints stay as they are.
        """
        self._require_open(writing=True)
        if type(step) is not int or not 0 <= step < 10**18:
            raise ValueError(f"step {step!r} must be an integer of at least 0")
        newest = max(self.steps(), default=-1)
        if step < newest:
            raise ValueError(
                f"step {step} is before step {newest}, the newest in {self.path}, which the next load "
                "would take; load it first, or use another directory"
            )
        content = {name: _state_of(value) for name, value in _named(state).items()}
        target = generations.directory_of(self.path, step)
        if os.path.lexists(target):
            self._save_again(step, content)
        else:
            self._write(step, content, target)
        with ForgeReader(target, step=step).opened():
            pass  # manifest and sizes as they are on the disk now
        self._retain()

    def load(self, state: MutableMapping[str, Any]) -> int | None:
        """Fill ``state`` from the newest sound checkpoint; returns its step, None if there is none.

        Everything that ``state`` names is verified before the first tensor changes. A corrupt
        checkpoint is moved to ``quarantine/`` with one warning (not with ``read_only``), and the next
        older one is tried. Raises CorruptCheckpoint naming all when none is sound, and
        CheckpointMismatch, with ``state`` untouched, when the newest sound one is of another state.
        """
        self._require_open(writing=False)
        names = _named(state)
        corrupt: dict[int, str] = {}
        while (step := self._newest_but(corrupt)) is not None:
            target = generations.directory_of(self.path, step)
            try:
                self._read(step, target, state, names)
            except CorruptCheckpoint as error:
                if os.path.lexists(target):  # else the writer's retention took it meanwhile
                    corrupt[step] = str(error)
                    self._set_aside(step, error)
                continue
            return step
        found = list(corrupt.values()) or [
            f"{self.path / generations.QUARANTINE / name}: found corrupt earlier"
            for name in generations.quarantined(self.path)
        ]
        if found:
            raise CorruptCheckpoint(
                f"no sound checkpoint in {self.path}; restore one from a copy, or start over in "
                "another directory\n  " + "\n  ".join(found)
            )
        return None

    def steps(self) -> list[int]:
        """Committed steps, oldest first. Committed, not verified: no data is read."""
        self._require_open(writing=False)
        return generations.committed_steps(self.path)

    def verify(self, step: int) -> None:
        """Read all of a checkpoint and compare it with its digests; raises CorruptCheckpoint."""
        self._require_open(writing=False)
        with Directory(generations.directory_of(self.path, step)) as directory:
            verify_all(directory, manifest.read(directory, step), self._threads)

    def inspect(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds, from its manifest alone: plain data, JSON if one likes.

        ``{"step", "torch", "bytes", "files": {name: bytes}, "tensors": {name: {"shape", "dtype",
        "bytes"}}, "objects": [names]}``; ``bytes`` of tied tensors count for each name, the total
        counts what is on disk. Raises CorruptCheckpoint.
        """
        self._require_open(writing=False)
        with ForgeReader(generations.directory_of(self.path, step), step=step).opened() as table:
            return _summary(table)

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
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

    def _open(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"{self.path} is a file; a store needs a directory, choose another path"
            )
        if self.read_only:
            if not self.path.is_dir():
                raise ValueError(f"{self.path} does not exist; check the path of the run")
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path)
            left = generations.remove_left_overs(self.path) if self._lock.held else []
        except OSError as error:
            self.close()
            raise ValueError(
                f"{self.path} cannot be written ({error.strerror}); choose a writable directory, or "
                "open it with read_only=True"
            ) from error
        if left:
            logger.info("%s: removed unfinished %s", self.path, ", ".join(left))

    def _write(self, step: int, content: dict[str, Any], target: Path) -> None:
        writer = ForgeWriter(target, step=step, threads=self._threads)
        try:
            _single_process(
                lambda: dcp_save(
                    content, storage_writer=writer, planner=ForgeSavePlanner(), no_dist=True
                )
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"step {step} was not saved in {self.path}: {error.strerror}; older checkpoints are "
                "untouched; make room or raise the limit, then save again",
            ) from error
        finally:
            writer.discard()

    def _save_again(self, step: int, content: dict[str, Any]) -> None:
        """The step is there: write beside it, compare, and keep the sound one."""
        target = generations.directory_of(self.path, step)
        again = target.with_name(f"{target.name}.tmp-again-{secrets.token_hex(4)}")
        self._write(step, content, again)
        try:
            with ForgeReader(again, step=step).opened() as made:
                wanted = made.content()
            try:
                with ForgeReader(target, step=step).opened() as there:
                    same = there.content() == wanted
                self.verify(step)
            except CorruptCheckpoint as error:
                self._set_aside(step, error)
                os.rename(again, target)
                sync_directory(self.path)
                return
            if not same:
                raise StepExists(
                    f"step {step} is already in {self.path} with another content; nothing was "
                    "replaced: save under a later step, or leave this save out"
                )
        finally:
            if again.exists():
                generations.remove(again)

    def _read(
        self, step: int, target: Path, state: MutableMapping[str, Any], names: dict[str, Any]
    ) -> None:
        reader = ForgeReader(target, step=step, threads=self._threads)
        with reader.opened():
            content = {name: _target_of(value) for name, value in names.items()}
            try:
                _single_process(
                    lambda: dcp_load(
                        content, storage_reader=reader, planner=ForgeLoadPlanner(), no_dist=True
                    )
                )
            except CheckpointMismatch as error:
                raise CheckpointMismatch(f"{target}: {error}") from None
        for name, value in names.items():
            if _is_stateful(value):
                value.load_state_dict(content[name])
            elif content[name] is not value:
                state[name] = content[name]

    def _newest_but(self, corrupt: Mapping[int, str]) -> int | None:
        # listed anew each time: beside a writer, steps come and go while we read
        left = [step for step in generations.found_steps(self.path) if step not in corrupt]
        return max(left, default=None)

    def _set_aside(self, step: int, error: CorruptCheckpoint) -> None:
        if self.read_only:
            logger.warning("step %d is corrupt, trying an older one: %s", step, error)
            return
        place = generations.quarantine(self.path, step)
        logger.warning("step %d is corrupt, moved to %s: %s", step, place, error)

    def _retain(self) -> None:
        """Drop all but the newest ``keep_last``, once the newest has been read back and compared."""
        steps = self.steps()
        old = steps[: -self.keep_last]
        if not old:
            return
        try:
            self.verify(steps[-1])
        except CorruptCheckpoint as error:
            self._set_aside(steps[-1], error)
            raise CorruptCheckpoint(
                f"{error}; it was written a moment ago: disk or memory fail. Older checkpoints are kept"
            ) from error
        for step in old:
            try:
                generations.remove(generations.directory_of(self.path, step))
            except OSError as error:
                logger.warning("step %d could not be removed: %s", step, error)

    def _require_open(self, *, writing: bool) -> None:
        if self._closed:
            raise ValueError(f"the store {self.path} is closed; open it again")
        if writing and self.read_only:
            raise ValueError(
                f"the store {self.path} was opened with read_only=True; open it to write"
            )


def _single_process(run: Callable[[], T]) -> T:
    """Run dcp quietly and raise what really happened instead of torch's per-rank wrapper."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            return run()
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise cause from None


def _named(state: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(state, Mapping) or not state or not all(type(k) is str and k for k in state):
        raise ValueError(
            f"state of type {type(state).__name__} must map at least one name to an object, such as "
            '{"model": model}'
        )
    return dict(state)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _state_of(value: Any) -> Any:
    return value.state_dict() if _is_stateful(value) else value


def _target_of(value: Any) -> Any:
    """What a load fills: None (take it as saved) for objects that set ``load_replaces``."""
    if _is_stateful(value) and getattr(value, "load_replaces", False):
        return None
    return _state_of(value)


def _summary(table: manifest.Manifest) -> dict[str, Any]:
    tensors = {
        name: {
            "shape": list(entry.shape),
            "dtype": str(entry.dtype).removeprefix("torch."),
            "bytes": sum(chunk.length for chunk in entry.chunks),
        }
        for name, entry in table.tensors.items()
    }
    return {
        "step": table.step,
        "torch": table.torch,
        "bytes": sum(entry.size for entry in table.files.values()),
        "files": {name: entry.size for name, entry in table.files.items()},
        "tensors": tensors,
        "objects": sorted(table.objects, key=str),
    }
