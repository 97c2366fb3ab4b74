"""From a Chrome trace of torch.profiler to seconds by kind of work and by span."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forge_parallel.profile.intervals import (
    Interval,
    Intervals,
    intersect,
    length,
    subtract,
    union,
)
from forge_parallel.profile.kinds import KINDS, kind_of_kernel, kind_of_operators
from forge_parallel.profile.span import PREFIX

Event = dict[str, Any]
_STEP = re.compile(r"^ProfilerStep#\d+$")
_HOST = {"cpu_op", "user_annotation"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_PYTHON = "python"  # the innermost name of a stretch that is in no operator
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


class _Host(NamedTuple):
    """Of the host's threads: stretches with the operators open in them, and the operators around each launch."""

    pieces: list[tuple[float, float, tuple[str, ...]]]
    launches: dict[int, tuple[float, tuple[str, ...]]]
    """By correlation: the microsecond of the launch, and names from the outermost operator to the innermost."""


def read_trace(path: str | Path) -> list[Event]:
    """The events of a Chrome trace, `.json` or `.json.gz`."""
    data = Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]


def step_windows(events: Iterable[Event]) -> Intervals:
    """The steps of a trace in microseconds, as `profile.step()` marked them."""
    return sorted(_interval(e) for e in events if _is_span(e) and _STEP.match(e["name"]))


def breakdown(events: Sequence[Event]) -> dict[str, Any]:
    """Where the seconds of the steps of a trace went.

        found = breakdown(read_trace("rank-0.trace.json.gz"))
        found["kinds"]["gemm"] / found["seconds"]           # the share of matrix products

    device                 "cuda" where the trace has kernels: it is about the GPU. Else "cpu", about the host's operators
    steps, seconds         marked by `torch.profiler.profile.step()`; without marks 1 and the extent of the trace
    kinds                  seconds of `KINDS` and of "idle"; their sum is `seconds`. An instant at which several run
                           counts once, for the first in the order of `KINDS`: "communication" is therefore exposed
    communication_hidden   seconds of communication under which something else ran
    spans                  by name (see `span`): `count`; `host_seconds`; `device_seconds`, when a kernel that it launched
                           ran (of a CPU: its operators and communication); `idle_seconds` of `kinds` meanwhile

    "idle" on a GPU is time without a kernel, copy or communication; on a CPU time of Python and of the autograd engine
    between operators. Operators of threads that ran at the same instant count once.
    """
    windows = step_windows(events)
    host = _walk(events)
    device = [e for e in events if e.get("ph") == "X" and e.get("cat") in _DEVICE]
    whole = union(windows) or _extent(events)
    found = _of_device(device, host) if device else _of_host(host)
    by_kind = {kind: intersect(union(found.get(kind, [])), whole) for kind in KINDS}
    kinds, claimed = dict[str, float](), Intervals()
    for kind, intervals in by_kind.items():
        kinds[kind] = _seconds(subtract(intervals, claimed))
        claimed = union([*claimed, *intervals])
    idle = subtract(whole, claimed)
    hidden = _seconds(by_kind["communication"]) - kinds["communication"]
    return {
        "device": "cuda" if device else "cpu",
        "steps": len(windows) or 1,
        "seconds": _seconds(whole),
        "kinds": {**kinds, "idle": _seconds(idle)},
        "communication_hidden": hidden,
        "spans": _spans(events, whole, idle, claimed, _launched(device, host)),
    }


def _of_device(device: Iterable[Event], host: _Host) -> dict[str, list[Interval]]:
    found = defaultdict[str, list[Interval]](list)
    for event in device:
        _, names = host.launches.get(_correlation(event), (0.0, ()))
        found[kind_of_kernel(event["name"], names)].append(_interval(event))
    return found


def _of_host(host: _Host) -> dict[str, list[Interval]]:
    found = defaultdict[str, list[Interval]](list)
    for start, end, names in host.pieces:
        kind = kind_of_operators(names)
        if kind is not None:
            found[kind].append((start, end))
    return found


def _spans(
    events: Sequence[Event],
    whole: Intervals,
    idle: Intervals,
    busy: Intervals,
    launched: list[tuple[float, Interval]],
) -> dict[str, dict[str, float]]:
    marked = defaultdict[str, list[Interval]](list)
    for event in events:
        if _is_span(event) and event["name"].startswith(PREFIX):
            cut = intersect([_interval(event)], whole)
            if cut:
                marked[event["name"].removeprefix(PREFIX)] += cut
    found = {}
    for name, intervals in marked.items():
        on_host = union(intervals)
        ran = _ran(on_host, launched, whole) if launched else intersect(on_host, busy)
        found[name] = {
            "count": len(intervals),
            "host_seconds": _seconds(on_host),
            "device_seconds": _seconds(ran),
            "idle_seconds": _seconds(intersect(on_host, idle)),
        }
    return found


def _ran(on_host: Intervals, launched: list[tuple[float, Interval]], whole: Intervals) -> Intervals:
    """When the kernels ran that were launched in `on_host`, on any thread."""
    at, found = 0, []
    for moment, interval in launched:
        while at < len(on_host) and on_host[at][1] < moment:
            at += 1
        if at < len(on_host) and on_host[at][0] <= moment:
            found.append(interval)
    return intersect(union(found), whole)


def _launched(device: Iterable[Event], host: _Host) -> list[tuple[float, Interval]]:
    """Of each kernel whose launch is known that moment and its interval, in the order of launches."""
    known = (e for e in device if _correlation(e) in host.launches)
    return sorted((host.launches[_correlation(e)][0], _interval(e)) for e in known)


def _walk(events: Iterable[Event]) -> _Host:
    threads = defaultdict[Any, list[Event]](list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _HOST | _LAUNCHES:
            threads[event["pid"], event["tid"]].append(event)
    host = _Host([], {})
    for thread in threads.values():
        host.pieces.extend(_pieces(thread, host.launches))
    return host


def _pieces(
    thread: list[Event], launches: dict[int, tuple[float, tuple[str, ...]]]
) -> Iterator[tuple[float, float, tuple[str, ...]]]:
    """Stretches of a thread in which the innermost operator stays the same, with all names that are open.

    Collectives of a worker thread may overlap without being nested: until the last one ends they are one stretch.
    """
    opened: list[tuple[float, tuple[str, ...]]] = []  # end and names, from the outermost on
    cursor = 0.0
    for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
        start, end = _interval(event)
        while opened and opened[-1][0] <= start:
            until, names = opened.pop()
            yield cursor, until, names
            cursor = max(cursor, until)
        names = opened[-1][1] if opened else ()
        if event["cat"] in _LAUNCHES:
            launches[_correlation(event)] = start, names
            continue
        if opened:
            yield cursor, start, names
        # code under an annotation is Python, whatever the annotation is called
        inner = (_PYTHON,) if event["cat"] == "user_annotation" else ()
        opened.append((end, (*(n for n in names if n != _PYTHON), event["name"], *inner)))
        cursor = start
    while opened:
        until, names = opened.pop()
        yield cursor, until, names
        cursor = max(cursor, until)


def _extent(events: Iterable[Event]) -> Intervals:
    timed = [_interval(e) for e in events if e.get("ph") == "X" and e.get("cat") != "Trace"]
    return [(min(t[0] for t in timed), max(t[1] for t in timed))] if timed else []


def _is_span(event: Event) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation"


def _interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _correlation(event: Event) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def _seconds(microseconds: Intervals) -> float:
    return length(microseconds) / 1e6
