"""Batches of one rank; their order depends on the stream and the cursor alone.

B   rows of this rank        S   tokens in a row
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from forge_data.batch import Batch
from forge_data.collate import digest_of_ids, make_batch
from forge_data.config import MAX_GLOBAL_BATCH, MAX_WORKERS
from forge_data.errors import InvalidData
from forge_data.ledger import Ledger, window_problem
from forge_data.protocols import Stream
from forge_data.workers import Workers

_NO_STEPS = "0" * 16
_LAST_CURSOR = 2**62  # ids are int64


class Loader:
    """Endless iterator over this rank's rows of each global batch.

    A step reads the instances at `cursor .. cursor + global_batch - 1`, in micro-batches of `micro_batch`
    rows: the ids of the same numbers, unless `skip` left some out.
    Rank r reads the r-th of `world_size` runs of consecutive micro-batches. If they do not divide, the
    first ranks read one more, and the others append filler rows (`filler_batch`), so that all ranks have
    `num_micro_batches`: by default as many as the fullest rank needs. No micro-batch mixes rows and
    filler.

    The instances depend on the stream, the cursor and the ledger of skipped windows alone: world size, `micro_batch`, `num_workers`
    and, between steps, `global_batch` may change at a resume. With workers, process w reads every
    `num_workers`-th step ahead of time; without, no process is started.
    Raises ValueError for a `micro_batch` that does not divide `global_batch`.
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
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} must be within 0..world_size-1 (world_size {world_size}); "
                "use the rank and world size of the process group"
            )
        if not 1 <= global_batch <= MAX_GLOBAL_BATCH:
            raise ValueError(
                f"global_batch {global_batch!r:.40} must be at least 1 and at most {MAX_GLOBAL_BATCH} "
                "rows; use 16"
            )
        if micro_batch < 1 or global_batch % micro_batch:
            raise ValueError(
                f"micro_batch {micro_batch!r:.40} must divide global_batch {global_batch}; use "
                f"{math.gcd(micro_batch, global_batch)}"
            )
        fullest = -(-global_batch // (micro_batch * world_size))
        if num_micro_batches is not None and num_micro_batches < fullest:
            raise ValueError(
                f"num_micro_batches {num_micro_batches!r:.40} must be at least {fullest}, which the "
                f"fullest of {world_size} ranks has of global_batch {global_batch}; use {fullest}"
            )
        if not 0 <= num_workers <= MAX_WORKERS:
            raise ValueError(
                f"num_workers {num_workers!r:.40} must be at least 0 and at most {MAX_WORKERS}; "
                "use 0 for no process"
            )
        self.stream = stream
        self.global_batch = global_batch
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.micro_batch = micro_batch
        self.num_micro_batches = num_micro_batches or fullest
        self._rows = _rows_of_rank(global_batch // micro_batch, rank, world_size, micro_batch)
        self._cursor = 0
        self._ledger = Ledger()
        self._chain = self._chain_before = _NO_STEPS
        self._last_batch: int | None = 0  # None after a state of an older version
        self._workers: Workers | None = None
        self._empty: Batch | None = None

    @property
    def cursor(self) -> int:
        """Instances in the batches returned so far, over all ranks."""
        return self._cursor

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
        ledger = Ledger(self._ledger.windows)
        ledger.add(first, last)
        following = int(self._ledger.ids([self._cursor])[0])
        if first < following:
            raise ValueError(
                f"window {first}..{last} must not begin before instance {following}, the next one: those "
                "before are in batches already; load a state from before them first"
            )
        self.close()  # workers have read ahead
        self._ledger = ledger

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        ids = self._ledger.ids(self._cursor + self._rows)  # (rows of the stream,)
        arrays = self._fetch() if self.num_workers else self.stream.arrays(ids)  # rows of each
        digest = digest_of_ids(self.ids(self._cursor, self._cursor + self.global_batch))
        batch = make_batch(arrays, ids, digest)
        missing = self.num_micro_batches * self.micro_batch - len(ids)
        batch = batch.with_filler(missing) if missing else batch
        self._cursor += self.global_batch
        self._last_batch = self.global_batch
        self._chain_before, self._chain = self._chain, _extend_chain(self._chain, digest)
        return batch

    def filler(self, rows: int) -> Batch:
        """Rows of filler with the stream's extras and dtypes, for a rank that cannot read its own rows.

        The first call reads dtypes and shapes from the stream: call it before the first step, and later
        calls need no data. Raises ValueError if the stream gives no arrays for an empty list of ids.
        """
        if self._empty is None:
            self._empty = self._without_rows()
        return self._empty.with_filler(rows)

    def _without_rows(self) -> Batch:
        nothing = np.empty(0, np.int64)
        try:
            return make_batch(self.stream.arrays(nothing), nothing, _NO_STEPS)
        except Exception as error:
            raise ValueError(
                f"{type(self.stream).__name__}.arrays of no ids must give arrays without rows, and raised "
                f"{type(error).__name__}: {error}; filler takes dtypes and shapes from them"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches returned so far, as JSON; equal on all ranks."""
        state = {
            "cursor": self._cursor,
            "digest_chain": self._chain,
            "fingerprint": self.stream.fingerprint(),
        }
        if (
            self._last_batch is not None
        ):  # with these two a resume checks that cursor and chain agree
            state["digest_chain_before"] = self._chain_before
            state["last_batch"] = self._last_batch
        if self.skipped:
            state["skipped"] = [list(window) for window in self.skipped]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches of `state`, in O(last batch). Raises as `load_checks`, and then the
        loader does not change."""
        self.load_checks(state)
        self.close()
        self._cursor, self._chain = state["cursor"], state["digest_chain"]
        self._chain_before = state.get("digest_chain_before", _NO_STEPS)
        self._last_batch = state.get("last_batch")
        self._ledger = Ledger(state.get("skipped", ()))

    def load_checks(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` comes from a loader and its digest chain ends at its cursor, and
        InvalidData with all differences if it was made from another stream. Changes nothing."""
        problem = _state_problem(state)
        if problem is not None:
            raise ValueError(
                f"loader state {problem}, so it does not come from Loader.state_dict(); "
                "load another checkpoint"
            )
        _refuse_other_data(state["fingerprint"], self.stream.fingerprint())

    def close(self) -> None:
        """End the worker processes, if any; the next batch starts new ones."""
        if self._workers is not None:
            workers, self._workers = self._workers, None
            workers.close()

    def __del__(self) -> None:
        if getattr(self, "_workers", None) is not None:
            self.close()

    def _fetch(self) -> dict[str, Any]:
        if self._workers is None:
            self._workers = Workers(
                self.stream,
                self._cursor,
                self.global_batch,
                self._rows,
                self.num_workers,
                self._ledger,
            )
        try:
            return self._workers.fetch()
        except BaseException:
            # The workers have read ahead of a batch that was not handed out; new ones start at the cursor.
            self.close()
            raise


def _state_problem(state: Any) -> str | None:
    """The reason why `state` is not the state of a loader; None for a valid one."""
    if not isinstance(state, Mapping) or not isinstance(state.get("fingerprint"), Mapping):
        return "has no fingerprint of its data"
    cursor, chain = state.get("cursor"), state.get("digest_chain")
    # States of versions before 0.2 lack the last link, so their chain cannot be compared.
    before, last = state.get("digest_chain_before", _NO_STEPS), state.get("last_batch")
    if type(cursor) is not int or not 0 <= cursor <= _LAST_CURSOR:
        return f"has cursor {cursor!r:.80}, which must be within 0..{_LAST_CURSOR}"
    for value in (chain, before):
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{16}", value):
            return f"has digest_chain {value!r:.80}, which must be 16 hex digits"
    windows = state.get("skipped", [])
    problem = window_problem(windows)
    if problem is not None:
        return f"has {problem}"
    if "last_batch" not in state:
        return None
    if type(last) is not int or not 0 <= last <= min(cursor, MAX_GLOBAL_BATCH):
        return (
            f"has last_batch {last!r:.80}, which must be within 0..{min(cursor, MAX_GLOBAL_BATCH)}"
        )
    # The chain binds cursor and history: an edited cursor, or one of another state, has another digest.
    digest = digest_of_ids(Ledger(windows).ids(np.arange(cursor - last, cursor)))
    ends = chain == (_extend_chain(before, digest) if last else _NO_STEPS) and (
        last > 0 or cursor == 0
    )
    return None if ends else f"has cursor {cursor}, where digest_chain {chain} does not end"


def _extend_chain(chain: str, digest: str) -> str:
    """The digest chain after one more step."""
    return hashlib.sha256((chain + digest).encode()).hexdigest()[:16]


def _rows_of_rank(
    num_micro_batches: int, rank: int, world_size: int, micro_batch: int
) -> np.ndarray:
    """Offsets in the global batch of a rank's rows: consecutive micro-batches, the first ranks one more."""
    each, more = divmod(num_micro_batches, world_size)
    first = rank * each + min(rank, more)
    return np.arange(first * micro_batch, (first + each + (rank < more)) * micro_batch)


def _refuse_other_data(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    different = [
        f"  {key}: checkpoint {saved.get(key, 'nothing')}, now {current.get(key, 'nothing')}"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]
    if different:
        raise InvalidData(
            "the checkpoint was made from other data or another packing, so its position means "
            "nothing here; restore what differs, or start a new run:\n" + "\n".join(different)
        )
