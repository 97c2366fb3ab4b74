"""Goodput: the time of a run by cause, over all of its attempts, and the best interval between saves. No torch, no clock.

The journal is the only source. An *attempt* begins with the process and ends with `stop`, `done`, `hang` or, after a
kill, with its last event.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forge_resilience._renamed import renamed
from forge_resilience._shared.problems import invalid
from forge_resilience.procfs import process_start
from forge_resilience.sinks import last_row

__all__ = [
    "CAUSES", "Goodput", "GoodputTable", "Interval", "daly_interval", "ettr", "goodput", "life_fields",
    "mean_time_bounds", "process_start_time", "read_goodput_table",
]  # fmt: skip

#: What a second of a run is counted as: one cause each, so that they add up to the time of the run.
CAUSES = {
    "steps": "steps that the run kept",
    "recompute": "steps that a crash or a rollback undid",
    "start": "from the start of the process to the first step, without the load",
    "load": "loading the checkpoint",
    "save": "steps waited for a save",
    "evaluate": "evaluation",
    "profile": "writing what a profiler saw",
    "hung": "no progress, until a supervisor noticed",
    "down": "from a crash to the next start",
    "queue": "from a requested stop to the next start",
    "idle": "between the end of the run and its extension",
}
_OFF = ("down", "queue", "idle")  # nothing runs: no ranks, no GPU hours
# event -> cause: its `seconds` are not counted as steps, because nothing was trained in them
_PAUSES = {"evaluation": "evaluate", "profile": "profile"}
_SAVES = ("save_staged", "save_written", "save", "pause")


@dataclass(frozen=True)
class Interval:
    """Milliseconds [begin, end) since 1970 on `ranks` ranks, and their cause."""

    begin: int
    end: int
    cause: str
    ranks: int


@dataclass(frozen=True)
class GoodputTable:
    """Intervals without gaps or overlaps: their lengths add up to the wall clock exactly, in milliseconds.

    losses: attempts that ended without `stop` or `done`, hangs included. stops: attempts that ended on request.
    saves: what training waited for each save, in seconds. steps_done: kept steps.
    """

    spans: tuple[Interval, ...]
    lives: int = 0
    losses: int = 0
    stops: int = 0
    saves: tuple[float, ...] = ()
    steps_done: int = 0

    @property
    def wall_ms(self) -> int:
        """From the start of the first attempt to the last sign of the last one."""
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0

    def milliseconds(self) -> dict[str, int]:
        """Cause -> milliseconds, of all causes; the sum is `wall_ms`."""
        return {cause: sum(s.end - s.begin for s in self._of(cause)) for cause in CAUSES}

    def gpu_hours(self) -> dict[str, float]:
        """Cause -> seconds x ranks / 3600 (one device a rank)."""
        work = {c: sum((s.end - s.begin) * s.ranks for s in self._of(c)) for c in CAUSES}
        return {cause: milliseconds / 3.6e6 for cause, milliseconds in work.items()}

    def _of(self, cause: str) -> list[Interval]:
        return [span for span in self.spans if span.cause == cause]


def read_goodput_table(
    events: Iterable[Mapping[str, Any]], last_sign: float | None = None
) -> GoodputTable:
    """Read the goodput table of a journal (`read_events`), oldest event first.

    It understands `start` and `resume` (step, world_size; optionally `began`: when the process started, `seconds`
    of the load, `reached`: {step, time} of the last row of the previous attempt), `pause` (cause, seconds), `evaluation` and
    `profile` (seconds), saves, `rollback` (to_step), `hang` (seconds), `stop` and `done`. Times are ISO 8601 or seconds
    since 1970. `last_sign` is the time of the last sign of the last attempt, if later than its last event. A clock
    that went back counts as standing still.
    """
    reader = _Reader()
    for event in events:
        reader.read(event)
    return reader.end(last_sign)


class _Reader:
    """Appends interval after interval; `at` is the end of the last one."""

    def __init__(self) -> None:
        self.spans: list[Interval] = []
        self.at: int | None = None
        # newest sign of life, because an attempt that was killed is counted up to it
        self.sign = 0
        self.ranks = 0
        # cause of the time up to the next attempt; "" while one runs, so that the next start tells that it was killed
        self.gap = ""
        # step -> when the saved state was taken, because the work after that is lost in a crash
        self.captured: dict[int, int] = {}
        self.saves: list[float] = []
        # (step, end, seconds); only of a save without a `pause` event, else its time would be counted twice
        self.last_save: tuple[int, int, float] | None = None
        self.paused_at: set[Any] = set()
        self.lives = self.losses = self.stops = self.first = self.step = 0

    def read(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        event = _typed(event)
        name, now = event.get("event"), event.get("time")
        if now is None:
            return  # not of our journal, which writes a time into each event
        if name in ("start", "resume"):
            self.begin_life(event, now)
            return
        if self.at is None:
            return

        seconds = _seconds(event.get("seconds"))
        if not self.gap:
            self.sign = max(self.sign, now)
            self.step = max(self.step, event.get("step", 0))

        if name in _PAUSES:
            self.interrupt(_PAUSES[name], now, seconds)
        elif name == "pause":
            self.interrupt(str(event.get("cause")), now, seconds)
            if event.get("cause") == "save":
                self.saves.append(seconds)
                self.paused_at.add(event.get("step"))
                self.last_save = None
        elif name == "hang":
            self.interrupt("hung", now, seconds)
            self.count_loss()

        elif name == "rollback":
            self.add("steps", now)
            self.step = event.get("to_step", event.get("step", 0))
            self.undo(self.step)
            return
        elif name in ("stop", "done") and not self.gap:
            # a save of the last step, so the stop waited for it
            if self.last_save is not None and self.last_save[0] == self.step:
                self.interrupt("save", *self.last_save[1:])
                self.saves.append(self.last_save[2])
            self.add("steps", now)
            if self.step in self.captured:  # the way out after the last save is no work to be lost
                self.captured[self.step] = now
            self.stops += name == "stop"
            self.gap = "queue" if name == "stop" else "idle"

        if name == "save" and event.get("step") not in self.paused_at:
            self.last_save = event.get("step", -1), now, seconds
        if name in _SAVES and "step" in event and not self.gap:
            self.captured.setdefault(event["step"], now - round(1000 * seconds))

    def begin_life(self, event: Mapping[str, Any], now: int) -> None:
        """Take a `start` or `resume`: close the previous attempt, and open a new one."""
        began = min(event.get("began", now), now)
        reached, lost = _typed(event.get("reached", {})), self.gap in ("", "down")
        if self.at is None:
            self.at = began
        else:
            # without a `stop` or `done` the previous attempt was killed, and its newest sign of life is its end
            if not self.gap:
                sign = max(self.sign, reached.get("time", 0))
                self.add("steps", min(sign, began))
                self.count_loss()
            self.add(self.gap, began)

        self.gap, self.lives = "", self.lives + 1
        self.ranks = event.get("world_size", 1)
        step = event.get("step", 0)
        if self.lives == 1:
            self.first = step
        self.add("start", now - round(1000 * _seconds(event.get("seconds"))))
        self.add("load", now)

        if lost or step < self.step:
            self.undo(step)
        self.step, self.sign = step, now

    def count_loss(self) -> None:
        """Count the end of the attempt as a crash or hang."""
        if not self.gap:
            self.losses += 1
            self.gap = "down"

    def add(self, cause: str, end: int) -> None:
        """Add the interval up to `end` with this cause."""
        assert self.at is not None
        cause = cause if cause in CAUSES else "steps"
        if end > self.at:
            ranks = 0 if cause in _OFF else self.ranks
            self.spans.append(Interval(self.at, end, cause, ranks))
            self.at = end

    def interrupt(self, cause: str, now: int, seconds: float) -> None:
        """Add the last `seconds` with this cause, and the time before them as steps."""
        if not self.gap:
            self.add("steps", now - round(1000 * seconds))
            self.add(cause, now)

    def undo(self, step: int) -> None:
        """Count the steps after `step` as recomputed: from the time at which its state was taken."""
        kept = [taken for saved, taken in self.captured.items() if saved <= step]
        since = max(kept, default=0)
        self.captured = {saved: t for saved, t in self.captured.items() if saved <= step}
        spans: list[Interval] = []
        for span in self.spans:
            if span.cause != "steps" or span.end <= since:
                spans.append(span)
                continue
            cut = max(span.begin, since)
            if cut > span.begin:
                spans.append(replace(span, end=cut))
            spans.append(replace(span, begin=cut, cause="recompute"))
        self.spans = spans

    def end(self, last_sign: float | None) -> GoodputTable:
        """Return the table after the last event."""
        if self.at is not None and not self.gap:
            self.add("steps", max(self.sign, round(1000 * (last_sign or 0))))
        spans, saves, steps = tuple(self.spans), tuple(self.saves), max(0, self.step - self.first)
        return GoodputTable(spans, self.lives, self.losses, self.stops, saves, steps)


@dataclass(frozen=True)
class Goodput:
    """Figures of a goodput table, in seconds; None where nothing was measured.

    ettr                kept steps / wall clock (without idle)
    mean_time           M: seconds that the run was up / losses
    mean_time_bounds    95 % bounds of M, only from the number of losses (Poisson); (M, inf) without a loss
    save_seconds        delta: mean wait for a save
    restart_seconds     R: hung, down, start and load per loss; without a loss, of the starts so far
    save_interval       tau: useful seconds between saves
    best_interval       Daly's tau of delta and M; of the lower bound of M if nothing was lost yet
    predicted_ettr      by the formula with the run's tau, and with the best one
    """

    wall_seconds: float
    seconds: dict[str, float]
    gpu_hours: dict[str, float]
    lives: int
    losses: int
    stops: int
    steps: int
    ettr: float
    mean_time: float | None
    mean_time_bounds: tuple[float, float | None]
    save_seconds: float | None
    restart_seconds: float
    step_seconds: float | None
    save_interval: float | None
    best_interval: float | None
    predicted_ettr: tuple[float | None, float | None]

    def lines(self) -> list[str]:
        """Return the report, a line for each cause and note."""
        total = self.wall_seconds or 1.0
        lines = [
            f"{'cause':10} {'seconds':>12} {'fraction':>8} {'dev. hours':>10}   what it is",
            *(f"{cause:10} {self.seconds[cause]:12.3f} {self.seconds[cause] / total:8.1%} "
              f"{self.gpu_hours[cause]:10.3f}   {text}" for cause, text in CAUSES.items()),
            f"{'wall':10} {self.wall_seconds:12.3f} {1:8.1%} {sum(self.gpu_hours.values()):10.3f}",
        ]  # fmt: skip
        return [*lines, *self.notes()]

    def notes(self) -> list[str]:
        """Sentences on crashes, restarts and the interval between saves."""
        lines = [
            f"attempts {self.lives}, of which crashed {self.losses}, stopped on request {self.stops}; steps kept {self.steps}",
            f"ETTR (effective training time ratio) {self.ettr:.4f}: time of kept steps / wall clock",
        ]  # fmt: skip

        low, high = self.mean_time_bounds
        if self.mean_time is None:
            lines.append(f"no crash yet: mean time to a crash above {low:.0f} s (95 %)")
        else:
            few = "; few crashes, a rough figure" if self.losses < 10 else ""
            lines.append(f"mean time to a crash {self.mean_time:.0f} s (95 %: {low:.0f} to {high:.0f} s{few})")  # fmt: skip

        lines.append(f"a restart costs {self.restart_seconds:.1f} s")
        if not self.best_interval or self.save_seconds is None:
            return [*lines, "no save was measured: no interval to advise"]
        every = f", {max(1, round(self.best_interval / self.step_seconds))} steps" if self.step_seconds else ""  # fmt: skip

        now, best = self.predicted_ettr
        lines.append(f"a save costs {self.save_seconds:.3f} s of steps; best interval (Daly) {self.best_interval:.0f} s{every}; "
                     f"expected ETTR {best:.4f}")  # fmt: skip
        if self.save_interval is not None and now is not None:
            lines.append(f"now every {self.save_interval:.0f} s; expected ETTR {now:.4f}")
        return lines


def goodput(table: GoodputTable) -> Goodput:
    """Compute the figures of a goodput table. Usage: `goodput(read_goodput_table(read_events(path))).lines()`."""
    seconds = {cause: ms / 1000 for cause, ms in table.milliseconds().items()}
    wall, steps, losses, saves = table.wall_ms / 1000, table.steps_done, table.losses, table.saves
    up = wall - sum(seconds[cause] for cause in _OFF)

    low, high = mean_time_bounds(up, losses)
    restart = (seconds["start"] + seconds["load"]) / max(1, table.lives)
    restart += (seconds["hung"] + seconds["down"]) / losses if losses else 0.0

    delta = sum(saves) / len(saves) if saves else None
    interval = (seconds["steps"] + seconds["recompute"]) / len(saves) if saves else None
    mean = up / losses if losses else None
    rate, best = mean or low, None
    now = ideal = None
    if delta is not None and rate > 0:
        best = daly_interval(delta, rate)
        now = ettr(interval, delta, restart, rate) if interval else None
        ideal = ettr(best, delta, restart, rate) if best else None

    busy = wall - seconds["idle"]
    return Goodput(
        wall_seconds=wall,
        seconds=seconds,
        gpu_hours=table.gpu_hours(),
        lives=table.lives,
        losses=losses,
        stops=table.stops,
        steps=steps,
        ettr=seconds["steps"] / busy if busy else 0.0,
        mean_time=mean,
        mean_time_bounds=(low, high),
        save_seconds=delta,
        restart_seconds=restart,
        step_seconds=seconds["steps"] / steps if steps else None,
        save_interval=interval,
        best_interval=best,
        predicted_ettr=(now, ideal),
    )


def ettr(interval: float, save: float, restart: float, mean_time: float) -> float:
    """Expected useful fraction of the wall clock: tau / (M e^(R/M) (e^((tau + delta)/M) - 1)), all in one unit.

    Losses come at a constant rate, also during saves and restarts (Daly 2006). 0 where it is below every float.
    """
    try:
        waste = math.exp(restart / mean_time) * math.expm1((interval + save) / mean_time)
    except OverflowError:
        return 0.0
    return interval / (mean_time * waste)


def daly_interval(save: float, mean_time: float) -> float:
    """Return the useful time between saves that nearly maximizes `ettr` (Daly 2006, eq. 37).

    sqrt(2 delta M) (1 + x/3 + x^2/9) - delta with x = sqrt(delta / 2M); M where a save takes 2 M and more, and 0
    for a save that costs nothing. Raises ValueError for a negative save or a mean time that is not positive.
    """
    if save < 0:
        raise invalid("save", "range", save, "must be at least 0", "give measured seconds")
    if mean_time <= 0:
        raise invalid("mean_time", "range", mean_time, "must be above 0", "give measured seconds")
    if save >= 2 * mean_time:
        return mean_time
    x = math.sqrt(save / (2 * mean_time))
    return math.sqrt(2 * save * mean_time) * (1 + x / 3 + x * x / 9) - save


def mean_time_bounds(
    up_seconds: float, losses: int, confidence: float = 0.95
) -> tuple[float, float | None]:
    """(lower, upper) bound of the mean time to a loss after `losses` in `up_seconds`; no upper one without losses.

    Exact for losses at a constant rate: the Poisson means under which so few, or so many, have half of
    1 - confidence. Without a loss the lower bound has all of it: up_seconds / 3.0, the rule of three.
    """
    tail, high = (1 - confidence) / (2 if losses else 1), 4.0 * losses + 20.0
    most = solve_falling(lambda mean: _poisson(losses, mean), tail, high)
    if not losses:
        return up_seconds / most, None
    least = solve_falling(lambda mean: _poisson(losses - 1, mean), 1 - tail, high)
    return up_seconds / most, up_seconds / least


def _poisson(most: int, mean: float) -> float:
    """P(N <= most)."""
    if not mean:
        return 1.0
    logs = (n * math.log(mean) - mean - math.lgamma(n + 1) for n in range(most + 1))
    return sum(map(math.exp, logs))


def solve_falling(falling: Callable[[float], float], value: float, high: float) -> float:
    """Solve falling(x) = value between 0 and `high` by bisection."""
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return (low + high) / 2


def life_fields(
    metrics: Path, step: int, seconds: float, schema: int | None = None
) -> dict[str, Any]:
    """Fields of `start` and `resume` of an attempt that continues from `step` with `seconds` of training.

    `began` of this process; after an earlier attempt `reached`, the step and time of its last row of metrics, and `steps_lost`
    and `seconds_lost`, the training between the loaded checkpoint and that row. Call it before the file is truncated to the
    loaded step. Times are seconds since 1970.
    """
    fields: dict[str, Any] = {"began": round(process_start_time(), 3)}
    if (last := last_row(metrics, schema=schema)) is not None:
        fields["reached"] = {"step": last["step"], "time": round(metrics.stat().st_mtime, 3)}
        fields["steps_lost"] = max(0, last["step"] - step)
        fields["seconds_lost"] = round(max(0.0, (last.get("seconds") or 0.0) - seconds), 4)
    return fields


def process_start_time() -> float:
    """Return the start of this process in seconds since 1970; without /proc, now."""
    ticks = process_start(os.getpid())
    # this clock, because /proc/PID/stat gives the start of a process by it
    up = time.clock_gettime(time.CLOCK_BOOTTIME) if ticks else 0.0
    return time.time() - max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))


_TYPES: dict[str, Any] = {"event": str, "cause": str, "reached": Mapping}
_TYPES |= dict.fromkeys(("step", "to_step", "world_size"), int)


def _typed(event: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an event, times in milliseconds. Fields of another type, of an edited or damaged line, are left out."""
    found = {k: v for k, v in event.items() if isinstance(v, _TYPES.get(k, object))}
    for name in ("time", "began"):
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            found[name] = _ms(found.pop(name))
    return found


def _ms(value: Any) -> int:
    """Milliseconds since 1970 of ISO 8601 or seconds."""
    if not isinstance(value, int | float):
        found = datetime.fromisoformat(value)
        value = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return round(1000 * value)


def _seconds(value: Any) -> float:
    """Seconds that an event states; 0 for what is no finite number of at least 0."""
    usable = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return float(value) if usable else 0.0


__getattr__ = renamed(__name__)
