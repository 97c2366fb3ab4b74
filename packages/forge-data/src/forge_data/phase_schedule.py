"""Where the phases of a run change rows, batches and mixtures: in sample indices, tokens and steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from forge_data._shared.problems import Problem
from forge_data.config import DataConfig
from forge_data.ledger import Ledger
from forge_data.loader import Loader
from forge_data.phases import PhaseSegment, phase_segments
from forge_data.protocols import Stream

__all__ = ["PhaseSchedule", "Point"]


class Point(NamedTuple):
    """Where a segment begins in a run that nothing disturbs: steps, rows and tokens before it."""

    steps: int
    rows: int
    tokens: int


class PhaseSchedule:
    """The segments of a run's data, between which something changes, and where they stand.

    A step belongs to the segment of its first instance. Where the length of rows changes the step before ends there,
    with fewer rows than the others; else it has all of its rows. Everything follows from the next instance,
    so from the state of a loader, except for `points` and what is said to be of a run that nothing disturbs: without skipped
    windows and in one global batch.
    """

    def __init__(self, data: DataConfig, global_batch: int) -> None:
        self._global_batch = global_batch
        self.segments = phase_segments(data)
        self._starts = [segment.start for segment in self.segments]
        self.points = self._points()

    @property
    def changes_batch(self) -> bool:
        """Whether steps have different numbers of tokens, so that the schedule of the rate counts tokens."""
        shapes = {(segment.seq_len, self.batch_of(segment)) for segment in self.segments}
        return len(shapes) > 1

    def at(self, instance: int) -> PhaseSegment:
        """The segment of the step whose first instance this is."""
        return self.segments[bisect_right(self._starts, instance) - 1]

    def batch_of(self, segment: PhaseSegment) -> int:
        """Rows of a whole step."""
        return segment.global_batch or self._global_batch

    def tokens(self, cursor: int, windows: Sequence[Sequence[int]] = ()) -> int:
        """Tokens of the first `cursor` rows that no window leaves out."""
        ledger = Ledger(windows)
        edges = [min(ledger.position(start), cursor) for start in self._starts] + [cursor]
        lengths = [segment.seq_len for segment in self.segments]
        return sum((b - a) * length for (a, b), length in zip(pairwise(edges), lengths))

    def cursor(self, tokens: int, windows: Sequence[Sequence[int]] = ()) -> int:
        """The cursor at which a run has seen so many tokens, the inverse of `tokens`.

        A rollback finds the data of bad steps by it; `windows` are what it skipped.
        """
        ledger, reached = Ledger(windows), 0
        for segment, following in zip(self.segments, self._starts[1:]):
            end = ledger.position(following)
            if tokens < (end - reached) * segment.seq_len:
                return reached + tokens // segment.seq_len
            tokens -= (end - reached) * segment.seq_len
            reached = end
        return reached + tokens // self.segments[-1].seq_len

    def steps_back(
        self, cursor: int, steps: int, windows: Sequence[Sequence[int]] = (), begin: int = 0
    ) -> int:
        """The cursor so many steps before a cursor, in the global batch of this configuration.

        `begin` is the cursor of any step before: those after an earlier global batch do not begin where they would have.
        """
        if not steps or not self.changes_batch:
            return max(0, cursor - steps * self._global_batch)
        ledger, begins, reached = Ledger(windows), list[range](), begin

        for number, segment in enumerate(self.segments):
            following, rows = self._starts[number + 1 : number + 2], self.batch_of(segment)
            end = min([cursor, *map(ledger.position, following)])
            # of the steps of this segment: a range, as they can be many
            begins.append(range(reached, max(reached, end), rows))
            reached += len(begins[-1]) * rows

            cut = self._cut(segment)
            if begins[-1] and cut is not None:
                reached = min(reached, ledger.position(cut))

        wanted = sum(map(len, begins)) - steps
        if wanted < 0 < begin:
            return self.steps_back(begin, -wanted, windows)
        for found in begins:
            if wanted < len(found):
                return found[max(0, wanted)]
            wanted -= len(found)
        return cursor

    def instances_back(self, loader: Loader, tokens: int, first: int, last: int) -> tuple[int, int]:
        """The first and last instance of steps, after so many tokens: of the step that began `first` steps ago up to the one
        before that of `last` steps ago, where 0 is the next step, so that `first` is the larger number.

        The loader may be a step further.
        """
        windows = loader.skipped
        end = self.cursor(tokens, windows)
        begin, stop = (self.steps_back(end, n, windows, loader.began) for n in (first, last))
        ids = loader.ids(begin, stop)
        return int(ids[0]), int(ids[-1])

    def at_step(self, step: int) -> tuple[PhaseSegment, int, int]:
        """Of step `step`, counted from 1, of a run that nothing disturbs: its segment, tokens before it, its tokens."""
        number = bisect_right([point.steps for point in self.points], step - 1) - 1
        segment, point = self.segments[number], self.points[number]
        done = (step - 1 - point.steps) * self.batch_of(segment)
        rows, cut = self.batch_of(segment), self._cut(segment)
        if cut is not None:
            rows = min(rows, cut - point.rows - done)
        return segment, point.tokens + done * segment.seq_len, rows * segment.seq_len

    def steps_of(self, tokens: int, cursor: int = 0, windows: Sequence[Sequence[int]] = ()) -> int:
        """Steps from a cursor on until so many tokens are seen, at least one."""
        ledger, steps = Ledger(windows), 0
        for segment, following in zip_longest(self.segments, self._starts[1:]):
            rows, cut = self.batch_of(segment), self._cut(segment)
            wanted = math.ceil(tokens / (rows * segment.seq_len))
            if following is None:
                return max(1, steps + wanted)
            # steps that begin in this segment, rounded up, as the last may end after it
            here = max(0, -(-(ledger.position(following) - cursor) // rows))
            end = cursor + here * rows
            if here and cut is not None:
                end = min(end, ledger.position(cut))
            seen = (end - cursor) * segment.seq_len
            if tokens <= seen:
                return max(1, steps + min(wanted, here))
            steps, tokens, cursor = steps + here, tokens - seen, end
        raise AssertionError("the last segment has no end")

    def scheduled(self, step: int, tokens: int) -> int:
        """The step at which the schedule of the rate stands after step `step`, with `tokens` in all.

        Where phases change the tokens of a step it counts them, in steps of the first segment, rounded up.
        """
        if not self.changes_batch:
            return step
        first = self.segments[0]
        return math.ceil(tokens / (self.batch_of(first) * first.seq_len))

    def scheduled_steps(self, total_steps: int) -> int:
        """The length of the schedule of a run."""
        _, tokens, own = self.at_step(total_steps)
        return self.scheduled(total_steps, tokens + own)

    def end_problem(self, stream: Stream, steps: int, key: str = "sources") -> Problem | None:
        """Why a stream that ends (`stream.end`) is too short for so many steps; None if it is not."""
        end = getattr(stream, "end", None)
        if end is None or self.rows_of(steps) <= end:
            return None
        # full steps before the end; the range makes no list of all
        last = bisect_right(range(1, steps + 1), end, key=self.rows_of)
        rule = (
            f"with max_epochs end after {end} sequences, in step {last + 1}, and the run has {steps} steps with "
            f"{self.rows_of(steps)} sequences"
        )
        fix = "raise one or leave one out" + (f", or train {last} steps" if last else "")
        return Problem(key, "length", ..., rule, fix)

    def rows_of(self, steps: int) -> int:
        """Rows of the first `steps` steps."""
        segment, tokens, own = self.at_step(steps)
        number = self.segments.index(segment)
        point = self.points[number]
        return point.rows + (tokens + own - point.tokens) // segment.seq_len

    def flops(
        self, tokens: int, per_token: Sequence[float], windows: Sequence[Sequence[int]] = ()
    ) -> float:
        """Operations for the first so many tokens, with those per token of each segment."""
        ledger = Ledger(windows)
        begins = [self.tokens(ledger.position(start), windows) for start in self._starts]
        edges = [min(begin, tokens) for begin in begins] + [tokens]
        return sum((b - a) * each for (a, b), each in zip(pairwise(edges), per_token))

    def lines(self, total_steps: int) -> list[str]:
        """A line for each phase that the run reaches: where it begins and what is new."""
        found = []
        for before, segment, point in zip(self.segments, self.segments[1:], self.points[1:]):
            if point.steps >= total_steps:
                found.append(f"phase {segment.name}: begins after the end of the run")
                continue

            news = []
            if segment.lr_multiplier != before.lr_multiplier:
                news.append(f"rate x {segment.lr_multiplier:g}")
            if segment.weights != before.weights:
                news.append(f"weights {dict(segment.weights or {})}")
            if self.batch_of(segment) != self.batch_of(before):
                news.append(f"global batch {self.batch_of(segment)}")

            if segment.seq_len != before.seq_len:
                order = "in a new order and a new epoch of each source"
                news.append(f"rows of {segment.seq_len} tokens, {order}")
                _, _, last = self.at_step(point.steps)
                rows = last // before.seq_len
                if rows != self.batch_of(before):
                    news.append(f"step {point.steps} before it has {rows} rows")

            where = f"step {point.steps + 1} (row {point.rows}, {point.tokens:,} tokens)"
            found.append(f"phase {segment.name}: from {where} on {', '.join(news)}")
        return found

    def _cut(self, segment: PhaseSegment) -> int | None:
        """The next instance with rows of another length, at which a step ends; None without."""
        number = self.segments.index(segment)
        others = (s.start for s in self.segments[number + 1 :] if s.seq_len != segment.seq_len)
        return next(others, None)

    def _points(self) -> list[Point]:
        points = [Point(0, 0, 0)]
        for before, segment in pairwise(self.segments):
            at, rows = points[-1], self.batch_of(before)
            steps = max(0, -(-(segment.start - at.rows) // rows))
            end, cut = at.rows + steps * rows, self._cut(before)
            if cut is not None:
                end = min(end, cut)
            tokens = at.tokens + (end - at.rows) * before.seq_len
            points.append(Point(at.steps + steps, end, tokens))
        return points
