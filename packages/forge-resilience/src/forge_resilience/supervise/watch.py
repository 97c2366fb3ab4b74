"""Limits of the phases of a rank, and which rank exceeds one: entries of heartbeats on the watcher's own clock."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from forge_resilience._shared.fields import Checked, field
from forge_resilience._shared.problems import Problem
from forge_resilience.heartbeat import HeartbeatRecord

#: At most so much of the time between two looks counts: a watcher that was stopped, starved, or asleep with its
#: machine has seen nothing.
_MOST_SECONDS = 2.0


@dataclass(frozen=True)
class WatchConfig(Checked):
    """Limits of the phases of a rank, in seconds; 0 means none. Raises ValueError with every broken rule.

    The default action, "report", starts no ranks again after a crash or hang, here and in what `command` makes. The
    command line `python -m forge_resilience.supervise`, and `supervise` without a config, restart by default.
    Usage: `WatchConfig("restart", step_seconds=120, limits={"save": 900})`.
    """

    action: Literal["off", "report", "restart"] = field(
        "report",
        "of the process that starts the ranks when one is late: restart kills them and starts them again, as it does "
        "after a crash; report prints where each rank is, and leaves them running",
    )
    # below `parallel.timeout_seconds`, 600, after which the ranks that wait for a hanging one fail
    step_seconds: float = field(540.0, "limit of a step, and of the wait for its data; 0: none")
    first_step_seconds: float = field(
        3600.0, "the same for the first step of a process, which may compile for long"
    )
    start_seconds: float = field(
        3600.0, "limit of the start, imports included, and of loading a checkpoint"
    )
    other_seconds: float = field(
        7200.0, "limit of any other phase: evaluate, save, exit, and a save in the background"
    )
    limits: dict[str, float] = field(dict, "limits of single phases, by name: {save = 900}")
    max_restarts: int = field(
        10,
        "restarts of one start of the command; two in a row without progress end it with 70",
        (0, 10**6),
    )

    def _problems(self) -> Iterator[Problem]:
        names = ("step_seconds", "first_step_seconds", "start_seconds", "other_seconds")
        seconds = {name: getattr(self, name) for name in names}
        seconds |= {f"limits.{phase}": value for phase, value in self.limits.items()}
        if not all(self.limits):
            rule, fix = "must be names of phases", "use save=900"
            yield Problem("limits", "format", sorted(self.limits), rule, fix)
        for name, value in seconds.items():
            if value and not 0.1 <= value <= 10**7:
                rule = "must be from 0.1 to 10**7 seconds, or 0 for no limit"
                yield Problem(name, "range", value, rule, "use 540")

    def limit(self, phase: str, first_step: bool = False) -> float:
        """Seconds that a rank may stay in `phase`; infinity without a limit."""
        step = self.first_step_seconds if first_step else self.step_seconds
        known = {
            "start": self.start_seconds,
            "load": self.start_seconds,
            "data": step,
            "step": step,
        }
        return (known | self.limits).get(phase, self.other_seconds) or float("inf")

    def command(self, journal: str = "", python: str = sys.executable) -> tuple[str, ...]:
        """Return the command of a supervisor with these limits, of ranks with heartbeats; append `--nproc N -- COMMAND`.

        It starts ranks again only with `action="restart"`.
        """
        limits = ",".join(f"{phase}={seconds}" for phase, seconds in self.limits.items())
        values = asdict(self) | {"limits": limits, "journal": journal}
        flags = [f"--{name}={value}" for name, value in values.items() if value != ""]
        return (python, "-m", "forge_resilience.supervise", *flags, "--expect_heartbeats")

    @property
    def shortest(self) -> float:
        """The shortest limit, infinity without any."""
        phases = ("start", "step", "other", *self.limits)
        return min(min(self.limit(phase), self.limit(phase, True)) for phase in phases)


@dataclass(frozen=True)
class Late:
    """A rank that has been in a phase for longer than its limit."""

    rank: int
    phase: str
    step: int | None
    seconds: float
    limit: float


@dataclass
class _Seen:
    """The entries of one rank that the watcher has seen."""

    # (process start, number), because a new process counts from 0 again
    entries: tuple[int, int] = (-1, -1)
    seconds: float = 0.0
    background: int = -1
    background_seconds: float = 0.0


class Watch:
    """Measures how long each rank has made no entry, and finds a rank beyond its limit.

        watch = Watch(config)
        late = watch.look(read_heartbeats(folder), {0, 1, 2, 3})     # every half second

    Only the time between looks counts, and of a long one two seconds, so a suspended laptop, a stopped
    supervisor or a jump of the clock makes no rank late. A rank without a file is in its start, but while no rank
    has one the program may write none: then no rank is late, unless `expects_heartbeats`. Reported once, a rank is
    late again after its next entry.
    """

    def __init__(
        self,
        config: WatchConfig,
        expects_heartbeats: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock = config, clock
        self._sees_heartbeats = expects_heartbeats
        self._seen: dict[int, _Seen] = {}
        # (rank, entry), so that each is reported once
        self._reported: set[tuple[int, tuple[object, int]]] = set()
        self._last: float | None = None

    def look(
        self, heartbeats: Iterable[HeartbeatRecord], running: Iterable[int], paused: bool = False
    ) -> Late | None:
        """Return the rank of `running` that is furthest beyond its limit, or None. `paused` (a debugger) lets no time pass."""
        now = self._clock()
        passed = 0.0 if self._last is None or paused else min(now - self._last, _MOST_SECONDS)
        self._last = now
        known = {heartbeat.rank: heartbeat for heartbeat in heartbeats}
        self._sees_heartbeats |= bool(known)
        late = [self._judge(rank, known.get(rank), passed) for rank in running]
        return max(filter(None, late), key=lambda one: one.seconds - one.limit, default=None)

    def seconds(self) -> Mapping[int, float]:
        """Seconds since the last entry of each rank, as the watcher counts them."""
        return {rank: seen.seconds for rank, seen in self._seen.items()}

    def _judge(self, rank: int, heartbeat: HeartbeatRecord | None, passed: float) -> Late | None:
        """Add the time that passed to a rank's phase; a `Late` if it exceeds the limit."""
        seen = self._seen.setdefault(rank, _Seen())
        entries = (0, 0) if heartbeat is None else (heartbeat.process_start, heartbeat.entries)
        seen.seconds = 0.0 if entries != seen.entries else seen.seconds + passed
        seen.entries = entries
        if heartbeat is None:
            late = Late(rank, "start", None, seen.seconds, self._config.limit("start"))
            return self._if_new(late, entries) if self._sees_heartbeats else None

        limit = self._config.limit(heartbeat.phase, first_step=heartbeat.steps <= 1)
        late = Late(rank, heartbeat.phase, heartbeat.step, seen.seconds, limit)
        return self._if_new(late, entries) or self._judge_background(heartbeat, passed)

    def _judge_background(self, heartbeat: HeartbeatRecord, passed: float) -> Late | None:
        """The same for background work of the rank."""
        seen = self._seen[heartbeat.rank]
        began = heartbeat.background_entries if heartbeat.background else -1
        seconds = 0.0 if began != seen.background else seen.background_seconds + passed
        seen.background, seen.background_seconds = began, seconds
        if began < 0:
            return None

        phase = f"{heartbeat.background} in the background"
        limit = self._config.limits.get(heartbeat.background, self._config.other_seconds)
        late = Late(heartbeat.rank, phase, heartbeat.step, seconds, limit or float("inf"))
        return self._if_new(late, ("background", began))

    def _if_new(self, late: Late, entry: tuple[object, int]) -> Late | None:
        """`late`, if its seconds exceed its limit and this entry is not reported yet."""
        if late.seconds <= late.limit or (late.rank, entry) in self._reported:
            return None
        self._reported.add((late.rank, entry))
        return late
