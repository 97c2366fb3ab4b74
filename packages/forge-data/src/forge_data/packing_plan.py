"""Which documents share a row: a function of their lengths alone, the same on every machine.

A document of at most a row stays whole. A longer one is cut into full rows and a remainder, which is packed like a
short document. Rows are filled window by window: a window is a number of documents that follow one another.

    N   documents        S   tokens in a row        P   pieces (parts of documents)        R   rows

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (ICML 2024), section 2: best-fit-decreasing over the
remainders. By groups of equal lengths and equal room it needs no search tree here.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from forge_data._shared.problems import invalid

__all__ = ["DEFAULT_WINDOW", "PLAN_VERSION", "PackingPlan", "plan_rows", "plan_windows"]

PLAN_VERSION = 1  # part of every fingerprint: raise it whenever a plan would change
DEFAULT_WINDOW = 1 << 16
PARTS = ("rows", "documents", "starts", "stops")


@dataclass(frozen=True)
class PackingPlan:
    """Row r is pieces `rows[r] .. rows[r+1] - 1`, by rising document; piece p is tokens `starts[p] .. stops[p] - 1` of
    document `documents[p]`. All int64."""

    seq_len: int
    rows: np.ndarray  # (R+1,)
    documents: np.ndarray  # (P,)
    starts: np.ndarray  # (P,)
    stops: np.ndarray  # (P,)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.rows) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces: those of the documents, each once."""
        return int((self.stops - self.starts).sum())

    @property
    def num_cut(self) -> int:
        """Documents that are in more than one row."""
        return len(np.unique(self.documents[self.starts > 0]))

    @property
    def utilization(self) -> float:
        """Tokens over places in the rows; the rest is padding."""
        return self.num_tokens / max(1, self.num_rows * self.seq_len)

    @property
    def policy(self) -> str:
        """Words for a fingerprint."""
        return f"plan-{PLAN_VERSION}"

    @property
    def digest(self) -> str:
        """16 hex digits of the content: the same for a plan that was read from files."""
        parts = {name: np.asarray(getattr(self, name), "<i8") for name in PARTS}
        return digest_of_parts(
            {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in parts.items()}
        )


def digest_of_parts(sha256: Mapping[str, str]) -> str:
    """16 hex digits of the digests of a plan's arrays by name."""
    named = json.dumps([sha256[name] for name in PARTS])
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def plan_rows(
    lengths: np.ndarray, seq_len: int, policy: str = "best_fit", window: int = DEFAULT_WINDOW
) -> PackingPlan:
    """A plan of rows of `seq_len` tokens for documents of `lengths` (N,), in which each token is once.

    `policy` "first_fit": pieces in the order of documents, each into the first row of the window with room. "best_fit":
    the longest first, each into the row with the least room that is enough (among equal ones, that which has waited
    longest). Time of a million documents in the default window: 2 s, O(log N) steps of Python each; best_fit 0.5 s,
    one step for all pieces of a length that go into rows of equal room. Raises ValueError for lengths below 1.
    Usage: `plan_rows(np.array([5, 3, 9]), seq_len=8).rows`.
    """
    found = list(plan_windows(lengths, seq_len, policy, window))
    before = np.cumsum([0, *(len(part.documents) for part in found)])
    rows = [part.rows[:-1] + offset for part, offset in zip(found, before)]
    return PackingPlan(
        seq_len,
        np.concatenate([*rows, before[-1:]]).astype(np.int64),
        *(
            np.concatenate([np.empty(0, np.int64), *(getattr(part, name) for part in found)])
            for name in ("documents", "starts", "stops")
        ),
    )


def plan_windows(
    lengths: np.ndarray, seq_len: int, policy: str = "best_fit", window: int = DEFAULT_WINDOW
) -> Iterator[PackingPlan]:
    """The plan of each window, in order, its documents numbered as in `lengths`: memory for one window only.

    Usage: `for part in plan_windows(lengths, 2048): ...`. Raises as `plan_rows`.
    """
    if policy not in _POLICIES:
        rule = f"must be one of {', '.join(_POLICIES)}"
        raise invalid("policy", "unknown", policy, rule, "use 'best_fit'")
    for name, value in (("seq_len", seq_len), ("window", window)):
        if value < 1:
            raise invalid(name, "range", value, "must be at least 1", "use 2048")
    for first in range(0, len(lengths), window):
        part = np.asarray(lengths[first : first + window], dtype=np.int64)
        if part.min() < 1:
            rule = f"of document {first + int(part.argmin())} must be at least 1"
            raise invalid("lengths", "range", int(part.min()), rule, "leave it out")
        yield _plan_window(part, first, seq_len, _POLICIES[policy])


def _plan_window(
    lengths: np.ndarray, first: int, seq_len: int, place: Callable[[np.ndarray, int], np.ndarray]
) -> PackingPlan:
    """The plan of documents `first ..` of `lengths` (N,): full rows of the long ones, then the rows of the rest."""
    full, rest = np.divmod(lengths, seq_len)  # (N,)
    num_full = int(full.sum())
    # (full rows,) their documents, as a long one fills several
    cut = np.repeat(np.arange(len(lengths)), full)
    cut_starts = (np.arange(num_full) - np.repeat(np.cumsum(full) - full, full)) * seq_len
    left = np.flatnonzero(rest)
    row_of = place(rest[left], seq_len)
    order = np.argsort(row_of, kind="stable")
    left = left[order]  # by row, and by document in a row, as the sort is stable
    begins = np.flatnonzero(np.diff(row_of[order], prepend=-1))  # (rows of the rest,)

    starts = np.concatenate([cut_starts, full[left] * seq_len])
    return PackingPlan(
        seq_len,
        np.concatenate([np.arange(num_full), begins + num_full, [len(starts)]]).astype(np.int64),
        np.concatenate([cut, left]) + first,
        starts,
        np.minimum(starts + seq_len, np.concatenate([lengths[cut], lengths[left]])),
    )


def _first_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """The row (P,) of each piece: the first with room for it, pieces in their order."""
    width = 1 << max(len(lengths) - 1, 0).bit_length()
    # a tree, so that a search takes log(width) steps: the most room under each node, leaves from `width` on
    room = [seq_len] * (2 * width)
    found = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths.tolist()):
        node = 1
        while node < width:
            node *= 2
            # right only where the left has no room, so that the first fit is found
            node += room[node] < length

        found[i] = node - width
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return found


def _best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """The row (P,) of each piece: that with the least room for it, the longest pieces first.

    Pieces of one length follow one another, and a row that is the best fit for one stays it until it has no room for
    another: so all rows of equal room are filled in one step.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    found = np.empty(len(lengths), np.int64)
    # those that some row has, sorted so that bisect finds the least that fits
    rooms: list[int] = []
    # room -> rows, the longest waiting first, as slices from the front take them
    waiting: dict[int, list[int]] = {}
    done = num_rows = 0

    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist()):
        end = done + count
        while done < end:
            at = bisect_left(rooms, size)
            room = rooms[at] if at < len(rooms) else seq_len
            # pieces that fill one such row, so that they are placed in one step
            each = room // size
            wanted = -(-(end - done) // each)
            if at < len(rooms):
                rows = waiting[room][:wanted]
                del waiting[room][:wanted]
                if not waiting[room]:
                    del waiting[room], rooms[at]
            else:
                rows = list(range(num_rows, num_rows + wanted))
                num_rows += wanted

            placed = min(end - done, len(rows) * each)
            found[order[done : done + placed]] = np.repeat(rows, each)[:placed]
            done += placed
            # pieces in the last of these rows, which may have room for more
            last = placed - (len(rows) - 1) * each
            for left, some in ((room - each * size, rows[:-1]), (room - last * size, rows[-1:])):
                if left and some:
                    if left not in waiting:
                        waiting[left] = []
                        insort(rooms, left)
                    waiting[left] += some
    return found


_POLICIES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "first_fit": _first_fit,
    "best_fit": _best_fit,
}
