"""Report of a hang: which rank is late, and where each rank is, by the stacks that faulthandler writes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forge_resilience._shared.paths import read_regular
from forge_resilience.heartbeat import HeartbeatRecord, read_heartbeats
from forge_resilience.procfs import catches, process_start, signal_process, state
from forge_resilience.supervise.watch import Late

_MOST_FRAMES = 12
_RECORDERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_STDLIB = sysconfig.get_paths()["stdlib"]
_WAITS = {"wait", "wait_tensor", "synchronize", "barrier"}
_WRAPPERS = {"wrapper", "_fn", "inner"}
_MOST_BYTES = 2**26
# bounds the search for a collective to the innermost frames
_DEEP = 10
#: Of a rank that has written none, because such a rank is still in its start.
_NO_HEARTBEAT = HeartbeatRecord(-1, 0, 0, "start", None, 0.0, 0, 0, "", 0.0, 0)


@dataclass(frozen=True)
class Stack:
    """Threads of one process, as faulthandler wrote them."""

    text: str

    @property
    def frames(self) -> list[tuple[str, str, str]]:
        """(file, line, function) of the main thread, innermost first."""
        main = self.text.strip().split("\n\n")[-1]  # faulthandler writes it last
        return [found.groups() for line in main.splitlines() if (found := _FRAME.match(line))]  # type: ignore[misc]

    @property
    def collective(self) -> str:
        """The collective or wait for other ranks in which the main thread is, or ""."""
        for file, _, function in self.frames[:_DEEP]:
            of_torch = "/torch/distributed/" in file and function not in _WRAPPERS
            waits = function in _WAITS and not file.startswith(_STDLIB)
            if of_torch or waits:
                return function
        return ""

    @property
    def place(self) -> str:
        """`function (file:line)` of the innermost frame that is not of a library."""
        frames = [f for f in self.frames if not f[0].startswith((_STDLIB, "<frozen"))]
        own = [f for f in frames if "/site-packages/" not in f[0]]
        for file, line, function in own or self.frames:
            return f"{function} ({file}:{line})"
        return ""


def collect_stacks(
    folder: Path, heartbeats: Iterable[HeartbeatRecord], seconds: float = 2.0
) -> dict[int, Stack]:
    """Ask the processes of `heartbeats` for their stacks, and wait up to `seconds` for them; by rank.

    A process that has no handler for SIGUSR2 is not asked, as it would die; one that is stopped, or in the kernel,
    does not answer.
    """
    waiting: dict[int, tuple[Path, int]] = {}
    for heartbeat in heartbeats:
        path, pid = folder / f"rank-{heartbeat.rank:05d}.stacks", heartbeat.pid
        size = len(_read_stacks(path))
        answers = path.exists() and catches(pid, signal.SIGUSR2) and state(pid)[0] not in "Tt"
        if answers and signal_process(pid, heartbeat.process_start, signal.SIGUSR2):
            waiting[heartbeat.rank] = path, size

    found: dict[int, Stack] = {}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        time.sleep(0.02)  # polling, as nothing reports that a file grows
        for rank, (path, size) in list(waiting.items()):
            text = _read_stacks(path)[size:].decode(errors="replace")
            # it has not grown since the last look, so faulthandler has written all of it
            if text and text == found.get(rank, Stack("")).text:
                del waiting[rank]
            elif text:
                found[rank] = Stack(text)
    return found


def _read_stacks(path: Path) -> bytes:
    with contextlib.suppress(OSError, ValueError):
        return read_regular(path, _MOST_BYTES)
    return b""


# ---- the report


@dataclass(frozen=True)
class _Rank:
    """One rank at the moment of the hang."""

    rank: int
    pid: int
    heartbeat: HeartbeatRecord
    letter: str
    words: str
    seconds: float
    stack: Stack

    def describe(self) -> str:
        """One line about the rank: phase, step, seconds, state, place."""
        heartbeat, collective, place = self.heartbeat, self.stack.collective, self.stack.place
        parts = (
            f"rank {self.rank} (pid {self.pid}), phase {heartbeat.phase}",
            "" if heartbeat.step is None else f"step {heartbeat.step}",
            heartbeat.background and f"{heartbeat.background} in the background",
            f"{self.seconds:.1f} s without an entry",
            self.words,
            collective and f"waits for other ranks in {collective}",
            place and f"in {place}",
        )
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Hang:
    """The late rank: a sentence, a message about all ranks, and the stacks of all ranks."""

    rank: int
    phase: str
    step: int | None
    seconds: float
    cause: str
    message: str
    stacks: str
    elsewhere: bool = False
    """Whether the late rank belongs to another supervisor."""


def describe_hang(
    folder: Path,
    late: Late,
    running: Mapping[int, int],
    ended: Mapping[int, int],
    seconds: Mapping[int, float],
    environ: Mapping[str, str],
    has_all_ranks: bool = True,
) -> Hang:
    """Collect stacks of the ranks in `running` (rank -> pid) and find the one that the others wait for.

    `has_all_ranks`: whether they are all ranks of the job; else the late one may be elsewhere.
    """
    heartbeats = {heartbeat.rank: heartbeat for heartbeat in read_heartbeats(folder)}
    alive = [b for b in heartbeats.values() if process_start(b.pid) == b.process_start]
    stacks = collect_stacks(folder, alive)

    ranks = []
    for rank in sorted({*running, *(b.rank for b in alive)}):
        heartbeat = heartbeats.get(rank, _NO_HEARTBEAT)
        pid = heartbeat.pid if heartbeat in alive else running.get(rank, 0)
        waited, stack = seconds.get(rank, 0.0), stacks.get(rank, Stack(""))
        ranks.append(_Rank(rank, pid, heartbeat, *state(pid), waited, stack))

    culprit, why = _late_rank(ranks, late)
    gone = [f"rank {rank} has ended with code {code}" for rank, code in sorted(ended.items())]
    phase = late.phase if culprit.rank == late.rank else culprit.heartbeat.phase
    step = culprit.heartbeat.step
    at = "" if step is None else f", step {step}"
    elsewhere = not has_all_ranks and bool(culprit.stack.collective)
    what = "waits for a rank of another supervisor" if elsewhere else "is late"
    cause = f"rank {culprit.rank} {what}: phase {phase}{at}, {why}"

    lines = [
        f"hang: {cause}; no entry for {late.seconds:.1f} s, and the limit of {late.phase} is {late.limit:g} s",
        *(f"  {text}" for text in [*(one.describe() for one in ranks), *gone]),
        *_flight_recorder(environ, [one.rank for one in ranks]),
    ]

    frames = culprit.stack.frames[:_MOST_FRAMES]
    if frames:
        lines.append(f"  rank {culprit.rank} is here, innermost first:")
        lines += [f"    {file}:{line} {function}" for file, line, function in frames]
    texts = [f"--- rank {rank}\n{stack.text.strip()}" for rank, stack in sorted(stacks.items())]
    message, stacks_text = "\n".join(lines), "\n".join(texts)
    return Hang(culprit.rank, phase, step, late.seconds, cause, message, stacks_text, elsewhere)


def _late_rank(ranks: list[_Rank], late: Late) -> tuple[_Rank, str]:
    """Find the rank that the others wait for; (rank, reason).

    A stopped process, or one that the kernel holds (it does not answer), explains itself. Else the one with the fewest
    entries, as all ranks make the same ones; among equals the one that is not waiting for others, or is where no other one is; else
    the one that was late first.
    """
    for one in ranks:
        if one.letter in "Tt" or (one.letter == "D" and not one.stack.text):
            return one, f"its process is {one.words}"

    counts = {one.rank: one.heartbeat.entries for one in ranks}
    behind = [one for one in ranks if counts[one.rank] == min(counts.values())]
    others = [one for one in ranks if one not in behind]
    busy = [one for one in behind if not one.stack.collective]
    waiting = [one for one in behind if one.stack.collective]

    places = Counter(one.stack.place for one in behind)
    common, most = places.most_common(1)[0]
    odd = [one for one in behind if one.stack.place not in ("", common)] if most > 1 else []
    suspects = busy if waiting and busy else odd or behind
    chosen = next((one for one in suspects if one.rank == late.rank), suspects[0])

    where = chosen.stack.place and f", in {chosen.stack.place}"
    if chosen.stack.collective:
        where = f", waits in {chosen.stack.collective}{where}"
    if others:
        lag = min(counts[one.rank] for one in others) - counts[chosen.rank]
        return chosen, f"{lag} {'entry' if lag == 1 else 'entries'} behind the others{where}"
    if busy and waiting:
        return chosen, f"the others wait for it in {waiting[0].stack.collective}{where}"
    if odd:
        return chosen, f"{most} others are together in {common}{where}"
    return chosen, f"{'makes no entry' if len(ranks) == 1 else 'no rank is behind another'}{where}"


def _flight_recorder(environ: Mapping[str, str], ranks: list[int]) -> list[str]:
    """Ask torch's flight recorders for their dumps, where they are on, and name the files."""
    if all(environ.get(name, "0") in ("", "0") for name in _RECORDERS):
        return []

    dump = next((environ[name] for name in _DUMPS if environ.get(name)), "")
    pipe = environ.get(_PIPE, "")
    asked = [rank for rank in ranks if pipe and _write_pipe(f"{pipe}{rank}.pipe")]
    if asked:
        time.sleep(1.0)  # the recorder's thread looks once a second
    path = Path(dump or "/tmp/nccl_trace_rank_")  # torch's default
    text = (
        f"ranks {asked} were asked for {path}RANK; torchfrtrace {path.parent} --prefix {path.name}"
    )
    if not asked:
        text = f"no rank listens at {_PIPE}, so a dump is written only by torch's own time-out; set it to be asked here"
    return [f"  flight recorder: {text}"]


def _write_pipe(path: str) -> bool:
    """Ask the flight recorder of a rank for its dump; False if none listens."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no pipe, or one without a reader: no recorder listens
        return False
    try:
        return os.write(descriptor, b"1\n") > 0
    finally:
        os.close(descriptor)
