"""Rows of a source: all documents concatenated and cut into rows of equal length, or put there by a plan.

Concatenate and split stores nothing: row r is tokens r*S .. r*S+S-1 of the source, its labels the same plus one, and
its documents are found by bisection in the memory-mapped offsets of the source. A plan says which pieces of documents
are row r (`forge_data.packing_plan`); what is left of a row is padding.

    N   instances of a call        S   tokens in a row
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.batch import IGNORE, PAD_DOCUMENT
from forge_data.config import MAX_SEQ_LEN, MAX_TOKENS_AT_ONCE
from forge_data.order import ORDER_VERSION, EpochOrder, epochs_of
from forge_data.packing_plan import PackingPlan
from forge_data.phased_stream import PhasedStream
from forge_data.protocols import Source

__all__ = ["PackedStream", "packing_report"]

POLICY = "concatenate_and_split-1"  # part of every fingerprint: raise it when a row would change
_OFFSETS_AT_ONCE = 1 << 20
ARRAYS = ("tokens", "labels", "positions", "document_ids")


class PackedStream:
    """The endless stream of instances of one source: `len(stream)` rows an epoch, each exactly once.

    Instance i is row `permutation(seed, i // n)(i % n)` of the packed source; without `shuffle` row
    `i % n`. Every token is an input once per epoch: long documents continue in the next row, the last
    row is padded. A row costs one read of S+1 tokens and two bisections, whatever i is.

    With a `plan` of the source's documents its rows are read instead, one read a piece. Each token is an input once per
    epoch there too, and a piece of a cut document predicts the token behind it.
    Raises ValueError for a bad `seq_len`. Usage: `PackedStream(source, 256, seed=0).instance(0)`.
    """

    def __init__(
        self,
        source: Source,
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
        plan: PackingPlan | None = None,
    ) -> None:
        if not 1 <= seq_len <= MAX_SEQ_LEN:
            rule = f"must be at least 1 and at most {MAX_SEQ_LEN}"
            raise invalid("seq_len", "range", seq_len, rule, "use 256")
        self.source = source
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        if plan is not None and (plan.seq_len, plan.num_tokens) != (seq_len, source.num_tokens):
            rule = f"tokens in rows of {plan.seq_len} must be the source's {source.num_tokens} in rows of {seq_len}"
            fix = "make the plan from its documents"
            raise invalid("plan", "mismatch", plan.num_tokens, rule, fix)

        self.plan = plan
        self._n = -(-source.num_tokens // seq_len) if plan is None else plan.num_rows
        self._count = np.arange(seq_len)
        self._order = EpochOrder(self._n, seed)

    def __len__(self) -> int:
        """Instances per epoch."""
        return self._n

    def rows(self, instance_ids: np.ndarray) -> np.ndarray:
        """The rows (N,) of the packed source for instances (N,)."""
        return (
            self._order.rows(instance_ids) if self.shuffle else epochs_of(instance_ids, self._n)[1]
        )

    def instance(self, i: int) -> dict[str, np.ndarray]:
        """Instance i as int64 arrays (S,): tokens, labels, positions, document_ids."""
        found = self.arrays(np.array([i]))
        return {name: found[name][0] for name in ARRAYS}

    def arrays(self, instance_ids: np.ndarray) -> dict[str, np.ndarray]:
        """The same for many instances: int64 arrays (N, S), and `source` (N,), 0."""
        shape = (len(instance_ids), self.seq_len)
        check_tokens_at_once(*shape)
        rows = self.rows(instance_ids)
        found = {name: np.empty(shape, np.int64) for name in ("tokens", "labels")}
        if self.plan is None:
            borders = self._concatenated(rows, **found)
        else:
            borders = self._planned(self.plan, rows, **found)
        return {**found, **self._documents(*borders), "source": np.zeros(shape[0], np.int64)}

    def documents_of(self, instance: int) -> list[int]:
        """The documents of an instance by their number in the source, in the order of its `document_ids`."""
        row = int(self.rows(np.array([instance]))[0])
        if self.plan is not None:
            found: list[int] = self.plan.documents[
                self.plan.rows[row] : self.plan.rows[row + 1]
            ].tolist()
            return found
        last = min((row + 1) * self.seq_len, self.source.num_tokens) - 1
        offsets = self.source.documents
        begin, end = np.searchsorted(offsets, [row * self.seq_len, last], side="right")
        return list(range(int(begin) - 1, int(end)))

    def fingerprint(self) -> dict[str, str | int]:
        """Everything that determines the rows, as flat JSON; a resume compares it."""
        source = self.source.fingerprint()
        if self.plan is not None:
            packing = {"policy": self.plan.policy, "plan": self.plan.digest}
        else:
            packing = {"policy": POLICY, "plan": self._digest(source)}
        return {
            **{f"source.{key}": value for key, value in source.items()},
            "packing.policy": packing["policy"],
            "packing.seq_len": self.seq_len,
            "packing.plan": packing["plan"],
            "order.version": ORDER_VERSION,
            "order.seed": self.seed,
            "order.shuffle": int(self.shuffle),
        }

    def _digest(self, source: dict[str, str | int]) -> str:
        plan = json.dumps([source.get("documents", source), self.seq_len, POLICY], sort_keys=True)
        return hashlib.sha256(plan.encode()).hexdigest()[:16]

    def report(self) -> dict[str, float | int]:
        """Rows of an epoch, part of their places that hold tokens, and documents in more than one row.

        Without a plan it reads all document offsets once.
        """
        used = self.source.num_tokens / (self._n * self.seq_len)
        cut = self._num_cut() if self.plan is None else self.plan.num_cut
        used = round(used, 6)
        return {
            "rows": self._n,
            "utilisation": used,
            "cut_documents": cut,
        }

    @property
    def source_lines(self) -> list[str]:
        """What the source is, for the start of a run."""
        own = getattr(self.source, "summary", None)
        return [own() if own is not None else f"{self.source.num_tokens:,} tokens"]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a plan made of the documents, for the start of a run."""
        if self.plan is None:
            return ()
        found = self.report()
        return (
            f"{self.plan.policy}: {found['rows']:,} rows, {1 - found['utilisation']:.2%} of them padding; "
            f"{found['cut_documents']:,} documents are longer than {self.seq_len} tokens and cut",
        )

    def _num_cut(self) -> int:
        """Documents over a border between rows that are concatenated."""
        documents, cut = self.source.documents, 0
        for first in range(0, len(documents), _OFFSETS_AT_ONCE):
            starts = np.asarray(documents[first : first + _OFFSETS_AT_ONCE + 1], np.int64)
            if first + _OFFSETS_AT_ONCE >= len(documents):
                starts = np.append(starts, self.source.num_tokens)
            cut += int((starts[:-1] // self.seq_len != (starts[1:] - 1) // self.seq_len).sum())
        return cut

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what was computed, as a worker computes it again from the arguments.
        return PackedStream, (self.source, self.seq_len, self.seed, self.shuffle, self.plan)

    def _concatenated(self, rows: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> _Borders:
        """Fill tokens and labels (N, S) of rows (N,)."""
        length, total = self.seq_len, self.source.num_tokens
        starts = rows * length
        stops = np.minimum(starts + length + 1, total)
        for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist())):
            ids = self.source.read(start, stop)
            inputs = min(len(ids), length)
            tokens[i, :inputs] = ids[:inputs]
            labels[i, : len(ids) - 1] = ids[1:]
            if inputs < length:
                tokens[i, inputs:] = 0
            labels[i, len(ids) - 1 :] = IGNORE
        # Only the documents that begin inside of a row are read from the mapped offsets: the others cost no read.
        documents = self.source.documents
        first = np.searchsorted(documents, starts, side="right")
        counts = np.searchsorted(documents, stops, side="left") - first
        row, nth = _numbered(counts)
        # each in 1..S, as "right" leaves out one that begins the row
        begins = np.asarray(documents[first[row] + nth]) - starts[row]
        labels[row, begins - 1] = IGNORE  # the end of one document does not predict the next
        inside = begins < np.minimum(stops - starts, length)[row]
        return _Borders(row[inside], begins[inside], np.minimum(stops - starts, length))

    def _planned(
        self, plan: PackingPlan, rows: np.ndarray, tokens: np.ndarray, labels: np.ndarray
    ) -> _Borders:
        """The same of the rows of a plan."""
        firsts = np.asarray(plan.rows[rows])
        counts = np.asarray(plan.rows[rows + 1]) - firsts
        row, nth = _numbered(counts)
        pieces = firsts[row] + nth
        owners = np.asarray(plan.documents[pieces])
        ends, offsets = self._document_ends(owners), np.asarray(self.source.documents[owners])
        begins = offsets + np.asarray(plan.starts[pieces])
        stops = offsets + np.asarray(plan.stops[pieces])  # (pieces,)
        after = np.cumsum(stops - begins)
        # a piece begins where those of its row before it end, so that the sum up to its row is taken off
        at = after - (stops - begins)
        at -= np.append(0, after)[np.cumsum(counts) - counts][row]
        given = zip(*(x.tolist() for x in (row, at, begins, stops, np.minimum(stops + 1, ends))))
        for i, place, begin, stop, last in given:
            ids = self.source.read(
                begin, last
            )  # with a label for the last, unless it ends the document
            size = stop - begin
            tokens[i, place : place + size] = ids[:size]
            labels[i, place : place + len(ids) - 1] = ids[1:]
            if len(ids) == size:
                labels[i, place + size - 1] = IGNORE

        used = np.bincount(row, stops - begins, len(rows)).astype(np.int64)
        for i in np.flatnonzero(used < self.seq_len).tolist():
            tokens[i, used[i] :], labels[i, used[i] :] = 0, IGNORE
        return _Borders(row[nth > 0], at[nth > 0], used)

    def _documents(
        self, row: np.ndarray, begins: np.ndarray, used: np.ndarray
    ) -> dict[str, np.ndarray]:
        """positions and document_ids (N, S) of rows in which documents, behind the first, begin at these places."""
        shape = len(used), self.seq_len
        if not len(row):
            ids, positions = np.zeros(shape, np.int64), np.broadcast_to(self._count, shape).copy()
        else:
            # documents of each row: one more than begin inside, as one begins the row
            counts = np.bincount(row, minlength=len(used)) + 1
            own, nth = _numbered(counts)
            # of each document in its row; the first has 0, as it begins the row
            starts = np.zeros(len(own), np.int64)
            starts[nth > 0] = begins
            places = own * self.seq_len + starts
            lengths = np.diff(places, append=len(used) * self.seq_len)
            ids = np.repeat(nth, lengths).reshape(shape)
            positions = np.repeat(starts, lengths).reshape(shape)
            np.subtract(self._count, positions, out=positions)

        for i in np.flatnonzero(used < self.seq_len).tolist():
            ids[i, used[i] :], positions[i, used[i] :] = PAD_DOCUMENT, 0
        return {"positions": positions, "document_ids": ids}

    def _document_ends(self, documents: np.ndarray) -> np.ndarray:
        """The token after the last of each document."""
        offsets = self.source.documents
        ends = np.asarray(offsets[np.minimum(documents + 1, len(offsets) - 1)])
        return np.where(documents + 1 < len(offsets), ends, self.source.num_tokens)


class _Borders(NamedTuple):
    """Documents that begin inside of rows, in order: the number of the row and the place in it, both (K,); and the places
    of each row that hold tokens, (N,)."""

    row: np.ndarray
    begins: np.ndarray
    used: np.ndarray


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of counts (N,) things of N rows: the row of each thing, and its number in it, both (sum of counts,)."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def check_tokens_at_once(rows: int, seq_len: int) -> None:
    """Raise ValueError for rows that are more tokens than fit into memory as one batch."""
    if rows * seq_len > MAX_TOKENS_AT_ONCE:
        rule = f"of seq_len {seq_len} must be at most {MAX_TOKENS_AT_ONCE} tokens at once"
        raise invalid("rows", "range", rows, rule, "use a smaller global_batch or more ranks")


def packing_report(stream: Any) -> dict[str, dict[str, float | int]]:
    """`report()` of each packed stream that has a plan, by its name in a mixture, or as "data"; behind the name of a phase
    with other rows.

    Usage: `packing_report(open_training(config))["data"]["rows"]`.
    """
    if isinstance(stream, PhasedStream):
        reports = [(part.name, packing_report(part.stream)) for part in stream.parts]
        return {".".join(filter(None, (n, k))): v for n, found in reports for k, v in found.items()}
    named = zip(stream.names, stream.streams) if hasattr(stream, "streams") else [("data", stream)]
    return {name: s.report() for name, s in named if getattr(s, "plan", None) is not None}
