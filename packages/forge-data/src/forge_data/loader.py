"""Batches of one rank; their order depends on the stream and the cursor alone.

B   rows of this rank        S   tokens in a row
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from forge_data._shared.problems import invalid, raise_problems
from forge_data.batch import Batch
from forge_data.collate import digest_of_ids, make_batch
from forge_data.config import MAX_GLOBAL_BATCH, MAX_WORKERS, prefetch_problems
from forge_data.differences import difference_lines
from forge_data.errors import InvalidData
from forge_data.ledger import Ledger
from forge_data.loader_state import NO_STEPS, Position, begins, state_problems
from forge_data.packing import check_tokens_at_once
from forge_data.phased_stream import Part, part_at, parts_of
from forge_data.places import PLACES, Places, num_shards_of, places_problems, sharded
from forge_data.protocols import Stream
from forge_data.read_ahead import ReadAhead
from forge_data.reading import Steps, read_rows
from forge_data.shard_workers import ShardWorkers
from forge_data.torch_workers import TorchWorkers
from forge_data.workers import WorkerLoss, Workers

__all__ = ["Loader"]


class Loader(IterableDataset[Batch]):
    """Endless iterator over this rank's rows of each global batch.

    A step reads the instances at `cursor .. cursor + global_batch - 1`, in micro-batches of `micro_batch`
    rows: the ids of the same numbers, unless `skip` left some out.
    Rank r reads the r-th of `world_size` runs of consecutive micro-batches. If they do not divide, the
    first ranks read one more, and the others append filler rows (`filler_batch`), so that all ranks have
    `num_micro_batches`: by default as many as the fullest rank needs. No micro-batch mixes rows and
    filler, but in the step before rows of another length (`PhasedStream`), which ends there.

    The instances depend on the stream, the cursor and the ledger of skipped windows alone: world size, `micro_batch`, `num_workers`
    and, between steps, `global_batch` may change at a resume.

    `prefetch` steps are read ahead: by processes, of which w reads every `num_workers`-th step (default: 2 steps
    each), or, without workers, by a thread (default: none, and no thread). A worker that dies, or hangs for
    `worker_timeout_seconds` (0: no limit), is replaced up to `worker_restarts` times in the life of the loader, and the
    steps that it had are read again; `on_event(name, **fields)` is told. Then ChildProcessError is raised.

    `accept_change` takes a state of other data: the next batch begins at the same instance of this stream. `changed` is
    then {key of the fingerprint: (of the state, of this stream)}.
    Raises ValueError for a `micro_batch` that does not divide `global_batch`; a batch raises InvalidData for data that
    cannot be read, and for any error of the code of a source, with the first instance and the source in its message.

    A sharded stream (`protocols.ShardedStream`) is read from front to back: workers own shards instead of steps, and the
    state holds the places of the shards that this rank read; `share_places` before a save makes them those of all ranks.
    `began` is the cursor of the state that was loaded last, 0 without one.

    It is an IterableDataset for torch's `DataLoader(loader, batch_size=None, num_workers=W)` and torchdata's
    `StatefulDataLoader`: worker w then reads every W-th step, and the batches come in the order that they have without
    workers. The loader in the own process does not move meanwhile: `state_dict(after=batch)` is its state there. A
    loader has either such workers, or `num_workers` or `prefetch` of its own; a sharded stream at most one of torch's.
    Usage: `loader = Loader(stream, global_batch=16); batch = next(loader)`.
    """

    def __init__(
        self,
        stream: Stream,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        *,
        micro_batch: int = 1,
        num_micro_batches: int | None = None,
        prefetch: int | None = None,
        worker_timeout_seconds: float = 600.0,
        worker_restarts: int = 3,
        accept_change: bool = False,
        on_event: Callable[..., None] | None = None,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            rule = f"must be within 0..world_size-1 (world_size {world_size})"
            fix = "use the rank and world size of the process group"
            raise invalid("rank", "range", rank, rule, fix)
        if not 1 <= global_batch <= MAX_GLOBAL_BATCH:
            rule = f"must be at least 1 and at most {MAX_GLOBAL_BATCH} rows"
            raise invalid("global_batch", "range", global_batch, rule, "use 16")
        if micro_batch < 1 or global_batch % micro_batch:
            rule = f"must divide global_batch {global_batch}"
            fix = f"use {math.gcd(micro_batch, global_batch)}"
            raise invalid("micro_batch", "divides", micro_batch, rule, fix)

        fullest = -(-global_batch // (micro_batch * world_size))
        if num_micro_batches is not None and num_micro_batches < fullest:
            rule = f"must be at least {fullest}, which the fullest of {world_size} ranks has of global_batch {global_batch}"
            fix = f"use {fullest}"
            raise invalid("num_micro_batches", "range", num_micro_batches, rule, fix)
        if not 0 <= num_workers <= MAX_WORKERS:
            rule = f"must be at least 0 and at most {MAX_WORKERS}"
            raise invalid("num_workers", "range", num_workers, rule, "use 0 for no process")

        raise_problems("", prefetch_problems(prefetch, num_workers))
        check_tokens_at_once(fullest * micro_batch, getattr(stream, "seq_len", 1))
        self.stream = stream
        self.global_batch = global_batch
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.micro_batch = micro_batch
        self.num_micro_batches = num_micro_batches or fullest
        micro_batches = np.arange(global_batch).reshape(-1, micro_batch)
        # where they do not divide, numpy gives the first ranks one more
        self._rows = np.array_split(micro_batches, world_size)[rank].ravel()
        self._part = part_at(stream, 0)

        self.began = 0
        self._at = Position()
        self._ledger = Ledger()
        self._torch = TorchWorkers()
        # steps that other workers of torch read before the next one here; None until this is such a worker
        self._skip: int | None = None
        # stay False in this process, as only workers of torch set them
        self._claimed = self._lost = False
        self._begin_count(self._at)

        self.prefetch = 2 * num_workers if prefetch is None else prefetch
        self.worker_timeout_seconds = worker_timeout_seconds
        self.worker_restarts = worker_restarts
        self.accept_change = accept_change
        self.changed: dict[str, tuple[Any, Any]] = {}
        self.on_event = on_event
        self._losses = 0  # workers that died or hung: at most worker_restarts
        self._ahead: Workers | ShardWorkers | ReadAhead | None = None
        self._ahead_pid = 0
        self._places = Places(num_shards_of(stream))
        # by the first instance of a part, as each has shapes of its own
        self._empty: dict[int, Batch] = {}

    @property
    def cursor(self) -> int:
        """Instances in the batches returned so far, over all ranks."""
        return self._at.cursor

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """(first, last) instance of each window that is left out, in order."""
        return self._ledger.windows

    def ids(self, start: int, stop: int) -> np.ndarray:
        """The instances at positions `start .. stop - 1`, as the cursor counts them; int64, shape (stop - start,)."""
        return self._ledger.ids(np.arange(start, stop))

    def skip(self, first: int, last: int) -> None:
        """Leave instances `first .. last` out of the batches to come; every rank calls it alike.

        The batches take the instances behind them instead. Windows are part of the state: after a resume
        they are left out, too. Raises ValueError for a window that begins before the next instance: it has
        been handed out.
        """
        self._torch.require_none("skip")
        ledger = Ledger(self._ledger.windows)
        ledger.add(first, last)
        following = self.next_instance
        if first < following:
            rule = f"must not begin before instance {following}, the next one, as batches contain those before it"
            fix = "load an earlier state first"
            raise invalid("window", "order", (first, last), rule, fix)
        self.close()  # what was read ahead has other instances
        self._ledger = ledger
        self._begin_count(self._at)

    def skip_rest(self, windows: Iterable[tuple[int, int]]) -> None:
        """Leave out what is still to come of windows; the batches contain the instances before, or an earlier skip left them out."""
        for first, last in windows:
            if last >= self.next_instance:
                self.skip(max(first, self.next_instance), last)

    def rebatch(
        self, global_batch: int, micro_batch: int, num_micro_batches: int | None = None
    ) -> None:
        """Give batches of another size from the next one on; every rank calls it alike. Raises as the constructor."""
        self._torch.require_none("rebatch")
        other = Loader(
            self.stream,
            global_batch,
            self.rank,
            self.world_size,
            micro_batch=micro_batch,
            num_micro_batches=num_micro_batches,
        )
        self.close()  # what was read ahead has other rows
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.num_micro_batches, self._rows = other.num_micro_batches, other._rows
        self._begin_count(self._at)

    @property
    def next_instance(self) -> int:
        """The first instance of the next batch."""
        return self._next_instance(self._at)

    def __iter__(self) -> Loader:
        self._lost = self._claimed
        return self

    def __next__(self) -> Batch:
        self._enter_worker()
        # the other workers read these steps, so that only the position moves
        for _ in range(self._skip or 0):
            self._at = self._following(self._at)

        self._enter_part()
        steps = self._steps()
        ids = steps.ids(0)  # (rows of the stream,), fewer than the batch has where filler follows
        arrays = self._fetch(steps) if self.prefetch else read_rows(self._part, ids)

        following = self._following(self._at)
        batch, places = _without_places(arrays, ids, following.digest)
        missing = self.num_micro_batches * self.micro_batch - len(ids)
        batch = batch.with_filler(missing) if missing else batch
        if places is not None:
            self._places.note(places)

        self._at = following
        worker = get_worker_info()
        if worker is None:
            self._torch.moved()
        else:
            self._skip = worker.num_workers - 1
        return batch

    def next_or_filler(
        self, prepare: Callable[[Batch], Batch] = lambda batch: batch
    ) -> tuple[Batch, Exception | None]:
        """The next batch, after `prepare`, and None; else a micro-batch of filler and the error, where it cannot be read.

        A rank can so take part in the collectives of the step, and tell the others of its error there.
        """
        try:
            return prepare(next(self)), None
        except Exception as error:
            return self.filler(self.micro_batch), error

    def filler(self, rows: int) -> Batch:
        """Rows of filler with the stream's extras and dtypes, for a rank that cannot read its own rows.

        The first call reads dtypes and shapes from the stream: call it before the first step, and later
        calls need no data. Raises ValueError if the stream gives no arrays for an empty list of ids.
        """
        self._enter_part()
        if not self._empty:  # of all parts, as data may be gone when a later one begins
            self._empty = {part.start: self._template(part) for part in parts_of(self.stream)}
        return self._empty[self._part.start].with_filler(rows)

    def _template(self, part: Part) -> Batch:
        """A batch of no rows: dtypes, shapes and extras for the batches that hold nothing."""
        nothing = np.empty(0, np.int64)
        try:
            return _without_places(part.arrays(nothing), nothing, NO_STEPS)[0]
        except InvalidData:  # its message already says what is wrong with the data
            raise
        except Exception as error:
            name, found = type(self.stream).__name__, f"{type(error).__name__}: {error}"
            rule = f"must give arrays without rows for no ids, and {name}.arrays raised {found}"
            fix = "filler takes dtypes and shapes from them"
            raise invalid("stream", "no_rows", ..., rule, fix) from error

    def state_dict(self, after: Batch | int | None = None) -> dict[str, Any]:
        """Return the position after the batches so far, as JSON; equal on all ranks, of a sharded stream after `share_places`.

        after: the last batch that was used, for a loop that reads ahead: torch's workers, accelerate; or the number of
        batches since the loader was made, loaded a state, or was told of another order (`skip`, `rebatch`). Costs one
        sha256 per step since the last call.
        Inside of a worker of torch it is the state after its own last batch, which only worker w of W loads again.

        Raises ValueError without `after` if workers of torch have taken batches, as this process does not see which of
        these were used; for a batch of another loader; and for one without rows of the stream, or a sharded stream,
        with `after`.
        """
        worker = get_worker_info()
        if after is None and worker is None:
            self._torch.require_none("state_dict")
        at = self._at if after is None else self._position_after(after)

        state = {
            "cursor": at.cursor,
            "digest_chain": at.chain,
            "fingerprint": self.stream.fingerprint(),
        }
        if at.last_batch is not None:  # with these two a resume checks that cursor and chain agree
            state["digest_chain_before"] = at.chain_before
            state["last_batch"] = at.last_batch

        if self.skipped:
            state["skipped"] = [list(window) for window in self.skipped]
        if num_shards_of(self.stream):
            state["shard_places"] = self._places.state()
        if worker is not None and after is None:
            skip = worker.id if self._skip is None else self._skip
            state["worker"] = [worker.id, worker.num_workers, skip]
        return state

    def share_places(self, maximum: Callable[[np.ndarray], np.ndarray]) -> None:
        """Take the places of all ranks, which makes their states equal; all ranks call it between the same steps.

        `maximum` returns the maximum of an int64 array over the ranks, such as an all-reduce on gloo. Streams without
        shards do not call it. A rank that begins with another's places reads less.
        """
        if num_shards_of(self.stream):
            self._places.table = maximum(self._places.table.copy())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches of `state`, in O(last batch). Raises as `load_checks`, and ValueError while workers
        of torch read copies of this loader; then the loader does not change."""
        self.load_checks(state)
        worker = get_worker_info()
        if worker is None:
            self._torch.reset()

        self.close()
        self.changed = self._changes(state)
        before = state.get("digest_chain_before", NO_STEPS)
        self._at = Position(state["cursor"], state["digest_chain"], before, state.get("last_batch"))
        self.began = self._at.cursor
        self._begin_count(self._at)
        if worker is not None:
            self._skip = state.get("worker", [worker.id])[-1]
        self._ledger = Ledger(state.get("skipped", ()))
        places = (
            () if self.changed else state.get("shard_places", ())
        )  # those of other data mean nothing
        self._places = Places(num_shards_of(self.stream), places)
        self._begin_at_places()

    def load_checks(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` comes from a loader and its digest chain ends at its cursor, and
        InvalidData with all differences if it was made from another stream, unless `accept_change`. Changes nothing.

        What a fingerprint says of instances from a later one on (keys with `from_N`) may be another one: phases that
        are still to come."""
        raise_problems("loader state", islice(state_problems(state), 1))
        _check_worker(state.get("worker"))
        different = self._changes(state)
        if different and not self.accept_change:
            lines = [f"  {line}" for line in difference_lines(different)]
            rule = "is of other data or another packing than the checkpoint's"
            fix = "choose another run directory, restore what differs, or set accept_change (data.accept_change of a job) to go on at the same sample"
            fix = "\n".join([f"{fix}:", *lines])
            raise invalid("fingerprint", "mismatch", [*different], rule, fix, kind=InvalidData)
        if different:
            return
        problems = places_problems(state.get(PLACES, []), num_shards_of(self.stream))
        raise_problems("loader state", islice(problems, 1))

    def _changes(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """What the stream of a state said, and what this one says, of the instances that the state has read."""
        saved, current = state["fingerprint"], self.stream.fingerprint()
        following = int(Ledger(state.get("skipped", ())).ids([state["cursor"]])[0])
        return {
            key: (saved.get(key, "nothing"), current.get(key, "nothing"))
            for key in sorted({*saved, *current})
            if saved.get(key) != current.get(key) and not 0 < following <= begins(key)
        }

    def close(self) -> None:
        """End the workers or the thread that read ahead, if any; the next batch starts new ones."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            if (
                self._ahead_pid == os.getpid()
            ):  # else they are those of the process that forked this one
                ahead.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ahead": None}

    def __del__(self) -> None:
        if getattr(self, "_ahead", None) is not None:
            self.close()

    def _enter_part(self) -> None:
        """Go on in the part of the stream that the next instance belongs to."""
        part = part_at(self.stream, self.next_instance)
        if (part.start, part.end) != (self._part.start, self._part.end):
            self.close()  # nothing was read of this part
            self._part = part

    def _steps(self) -> Steps:
        end = self._part.end
        until = None if end is None else self._ledger.position(end)
        return Steps(self._at.cursor, self.global_batch, self._rows, self._ledger, until)

    def _enter_worker(self) -> None:
        """Check that the next batch may be read here: in the process of the loader, or in a worker of torch."""
        worker = get_worker_info()
        if worker is None:
            self._torch.require_none("next")
        elif self._lost:
            rule = "would lose what the workers had read ahead: this is a second iterator over persistent workers"
            fix = "use one iterator, or persistent_workers=False and load_state_dict before each further one"
            raise invalid("persistent_workers", "again", ..., rule, fix)
        elif not self._claimed:
            if self.num_workers or self.prefetch:
                own = f"num_workers {self.num_workers} and prefetch {self.prefetch}"
                rule = f"of torch's DataLoader would read next to the loader's own ({own})"
                fix = "use Loader(num_workers=0, prefetch=0), or DataLoader(num_workers=0)"
                raise invalid("num_workers", "both", worker.num_workers, rule, fix)

            if num_shards_of(self.stream) and worker.num_workers > 1:
                rule = "of torch's DataLoader would each tokenize all shards of a stream"
                fix = "use Loader(num_workers=N) and DataLoader(num_workers=0)"
                raise invalid("num_workers", "sharded", worker.num_workers, rule, fix)

            self._torch.claim(loaded=self._skip is not None)
            self._claimed = True
            if self._skip is None:
                self._skip = worker.id

    def _next_instance(self, at: Position) -> int:
        return int(self._ledger.ids([at.cursor])[0])

    def _following(self, at: Position) -> Position:
        """The position after the batch that follows one; reads no data."""
        cursor = at.cursor + self.global_batch
        end = part_at(self.stream, self._next_instance(at)).end
        if end is not None:
            cursor = min(cursor, self._ledger.position(end))
        return at.after(cursor, digest_of_ids(self.ids(at.cursor, cursor)))

    def _begin_count(self, at: Position) -> None:
        """Count batches for `state_dict(after=...)` from a position on."""
        self._first = self._counted = 0, at
        self._claimed = self._lost = False
        self._torch.moved()

    def _position_after(self, after: Batch | int) -> Position:
        """The position after a batch, or after a number of them."""
        if num_shards_of(self.stream):
            rule, fix = (
                "has the cursors of shards that were read last, not those after a batch",
                "use Loader(num_workers=N) and state_dict() without after",
            )
            raise invalid("after", "sharded", ..., rule, fix)

        if not isinstance(after, Batch):
            if type(after) is not int or after < 0:
                raise invalid("after", "range", after, "must be a Batch or a number of batches", "")
            count, at = self._counted if self._counted[0] <= after else self._first
            for _ in range(after - count):
                at = self._following(at)
            self._counted = after, at
            return at

        rows = after.instance_ids[after.instance_ids >= 0]
        if not len(rows):
            rule = "must have a row of the stream"
            raise invalid("after", "filler", ..., rule, "give the number of batches")

        first = int(rows.min())
        for count, at in (self._counted, self._first):
            while at.digest != after.digest and self._next_instance(at) <= first:
                count, at = count + 1, self._following(at)
            if at.digest == after.digest:
                self._counted = count, at
                return at

        rule = (
            "must be a batch of this loader since it was made, loaded a state, or changed its order"
        )
        fix = "call state_dict(after=batch) before load_state_dict, skip and rebatch"
        raise invalid("after", "unknown", after.digest, rule, fix)

    def _fetch(self, steps: Steps) -> Mapping[str, Any]:
        """The arrays of the next step, read ahead."""
        if self._ahead is None:
            self._ahead, self._ahead_pid = self._read_ahead(steps), os.getpid()
        try:
            found: Mapping[str, Any] = self._ahead.fetch()
            return found
        except BaseException:
            # Steps behind one that was not handed out were read; those who come start at the cursor.
            self.close()
            raise

    def _begin_at_places(self) -> None:
        """Let a sharded stream go on where the batches that were returned end."""
        stream = sharded(self.stream)
        if stream is not None:
            stream.load_places(self._places.table)

    def _read_ahead(self, steps: Steps) -> Workers | ShardWorkers | ReadAhead:
        self._begin_at_places()
        if not self.num_workers:
            return ReadAhead(partial(_read_step, self._part, steps), self.prefetch)
        self.stream.fingerprint()  # what it needs of raw files is read here, and not by each worker
        limits = self.num_workers, self.prefetch, self.worker_timeout_seconds, self._lose
        stream = sharded(self.stream)
        if stream is not None:
            return ShardWorkers(stream, steps, *limits)
        return Workers(self._part, steps, *limits)

    def _lose(self, loss: WorkerLoss) -> None:
        """Count a lost worker; ChildProcessError if that was one too many."""
        self._losses += 1
        if self._losses > self.worker_restarts:
            raise ChildProcessError(
                f"{loss}; the limit is {self.worker_restarts} restarts (worker_restarts): look for what ends or "
                "stops it (memory of the job, a library that crashes, storage), or use num_workers 0"
            )
        if self.on_event is not None:
            self.on_event("data_worker_lost", **vars(loss), restarts=self._losses)
        self._begin_at_places()  # which the one that replaces it copies


def _read_step(stream: Stream, steps: Steps, step: int) -> Mapping[str, Any]:
    return read_rows(stream, steps.ids(step))


def _check_worker(saved: Any) -> None:
    """Raise ValueError for the state of a worker of torch's DataLoader, except in the same worker of as many."""
    worker = get_worker_info()
    own = None if worker is None else [worker.id, worker.num_workers]
    if saved is not None and (not isinstance(saved, list) or saved[:-1] != own):
        here = "no worker" if own is None else f"worker {own[0]} of {own[1]}"
        rule = (
            f"must be loaded in the worker of torch's DataLoader that gave it, and this is {here}"
        )
        fix = "load the state of the whole StatefulDataLoader with its num_workers, or save loader.state_dict(after=batch)"
        raise invalid("worker", "mismatch", saved, rule, fix, where="loader state")


def _without_places(
    arrays: Mapping[str, Any], ids: np.ndarray, digest: str
) -> tuple[Batch, Any | None]:
    """A batch, and the places of its rows if the stream is sharded."""
    arrays = dict(arrays)
    places = arrays.pop(PLACES, None)
    return make_batch(arrays, ids, digest), places
