"""Spans of a step, and the breakdown of a Chrome trace of torch.profiler: seconds by kind of work and by span, as tables."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.autograd.profiler import record_function

from forge_parallel.profile.kinds import KINDS, kind_of_kernel, kind_of_operators

Event = dict[str, Any]
Interval = tuple[float, float]
Intervals = list[Interval]
"""A set of instants as a sorted list of disjoint (start, end), in microseconds."""

#: Prefix of the names of spans in a trace; without it a table would mix them with torch's own annotations.
PREFIX = "forge."

_STEP = re.compile(r"^ProfilerStep#\d+$")
_HOST = {"cpu_op", "user_annotation"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_PYTHON = "python"  # innermost name of a segment outside of all operators

_LABELS = {
    "gemm": "matrix products",
    "attention": "attention",
    "optimizer": "optimizer",
    "elementwise": "elementwise and all else",
    "copy": "memory copies",
    "communication": "communication, exposed",
    "idle": "idle",
}
_MEMORY = {
    "optimizer": "optimizer state",
    "activations_and_other": "activations and all else, at the step's peak",
    "step_peak_gradients": "gradients, at the step's peak",
    "step_peak": "step's peak, these two",
    "peak": "peak with all that was there before",
}


def span(name: str) -> record_function:
    """Mark the code inside a `with` block as the part `name` of a step.

        with span("data"):
            batch = next(loader)

    A trace shows it as `forge.data`, and `breakdown` gives it a row. Spans may be nested. Cost: two calls into the
    dispatcher, about 4 microseconds on a CPU core, with and without a profiler.
    """
    return record_function(PREFIX + name)


def read_trace(path: str | Path) -> list[Event]:
    """Return the events of a Chrome trace, `.json` or `.json.gz`."""
    data = Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]


def step_windows(events: Iterable[Event]) -> Intervals:
    """Return the steps of a trace, as `torch.profiler.profile.step()` marked them."""
    return sorted(_interval(e) for e in events if _is_annotation(e) and _STEP.match(e["name"]))


class _Host(NamedTuple):
    """Segments of the host's threads with the operators open in them, and the operators around each kernel launch."""

    segments: list[tuple[float, float, tuple[str, ...]]]
    launches: dict[int, tuple[float, tuple[str, ...]]]
    """By correlation: the microsecond of the launch, and names from the outermost operator to the innermost."""


def breakdown(events: Sequence[Event]) -> dict[str, Any]:
    """Return where the seconds of the steps of a trace went.

        found = breakdown(read_trace("rank-0.trace.json.gz"))
        found["kinds"]["gemm"] / found["seconds"]           # fraction of the time in matmuls

    device                 "cuda" if the trace has kernels: all times are the GPU's. Else "cpu": those of host operators
    steps, seconds         marked by `torch.profiler.profile.step()`; without marks 1 and the extent of the trace
    kinds                  seconds of `KINDS` and of "idle"; their sum is `seconds`. An instant at which several run
                           counts once, for the first in the order of `KINDS`: "communication" is therefore exposed
    communication_hidden   seconds of communication under which another kind ran
    spans                  by name (see `span`): `count`; `host_seconds`; `device_seconds`, in which a kernel launched by
                           the span ran (on a CPU: its operators and communication); `idle_seconds` of `kinds` in it

    "idle" on a GPU is time without a kernel, copy or communication; on a CPU time of Python and of the autograd engine
    between operators. Operators of threads that ran at the same instant count once.
    """
    windows = step_windows(events)
    host = _read_host(events)
    device = [e for e in events if e.get("ph") == "X" and e.get("cat") in _DEVICE]
    extent = union(windows) or _extent(events)

    found = defaultdict[str | None, list[Interval]](list)
    for event in device:
        _, names = host.launches.get(_correlation(event), (0.0, ()))
        found[kind_of_kernel(event["name"], names)].append(_interval(event))
    if not device:
        for start, end, names in host.segments:
            found[kind_of_operators(names)].append((start, end))

    # a kind claims the instants that no earlier kind has claimed
    by_kind = {kind: intersect(union(found[kind]), extent) for kind in KINDS}
    kinds, claimed = dict[str, float](), Intervals()
    for kind, intervals in by_kind.items():
        kinds[kind] = _seconds(subtract(intervals, claimed))
        claimed = union([*claimed, *intervals])
    idle = subtract(extent, claimed)
    known = [e for e in device if _correlation(e) in host.launches]
    launched = sorted((host.launches[_correlation(e)][0], _interval(e)) for e in known)

    hidden = _seconds(by_kind["communication"]) - kinds["communication"]
    return {
        "device": "cuda" if device else "cpu",
        "steps": len(windows) or 1,
        "seconds": _seconds(extent),
        "kinds": {**kinds, "idle": _seconds(idle)},
        "communication_hidden": hidden,
        "spans": _spans(events, extent, idle, claimed, launched),
    }


def _spans(
    events: Sequence[Event],
    extent: Intervals,
    idle: Intervals,
    busy: Intervals,
    launched: list[tuple[float, Interval]],
) -> dict[str, dict[str, float]]:
    """The `spans` of a breakdown. `busy` are all instants that are not `idle`; `launched` the kernels as (time of the
    launch, interval), in the order of launches."""
    marked = defaultdict[str, list[Interval]](list)
    for event in events:
        if _is_annotation(event) and event["name"].startswith(PREFIX):
            inside = intersect([_interval(event)], extent)
            if inside:
                marked[event["name"].removeprefix(PREFIX)] += inside

    found = {}
    for name, intervals in marked.items():
        on_host = union(intervals)
        ran = _ran(on_host, launched, extent) if launched else intersect(on_host, busy)
        found[name] = {
            "count": len(intervals),
            "host_seconds": _seconds(on_host),
            "device_seconds": _seconds(ran),
            "idle_seconds": _seconds(intersect(on_host, idle)),
        }
    return found


def _ran(
    on_host: Intervals, launched: list[tuple[float, Interval]], extent: Intervals
) -> Intervals:
    """Instants at which kernels ran that any thread launched in `on_host`."""
    at, found = 0, []
    for moment, interval in launched:
        while at < len(on_host) and on_host[at][1] < moment:
            at += 1
        if at < len(on_host) and on_host[at][0] <= moment:
            found.append(interval)
    return intersect(union(found), extent)


def _read_host(events: Iterable[Event]) -> _Host:
    """Segments and launches of all threads."""
    threads = defaultdict[Any, list[Event]](list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _HOST | _LAUNCHES:
            threads[event["pid"], event["tid"]].append(event)
    host = _Host([], {})
    for thread in threads.values():
        host.segments.extend(_segments(thread, host.launches))
    return host


def _segments(
    thread: list[Event], launches: dict[int, tuple[float, tuple[str, ...]]]
) -> Iterator[tuple[float, float, tuple[str, ...]]]:
    """Segments (start, end, open names) of a thread in which the innermost operator stays the same; fills `launches`.

    Collectives of a worker thread may overlap without being nested: until the last one ends they are one segment.
    """
    opened: list[tuple[float, tuple[str, ...]]] = []  # end and names, from the outermost on
    cursor = 0.0
    # of events with the same start the longer one is the outer one
    for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
        start, end = _interval(event)
        while opened and opened[-1][0] <= start:
            until, names = opened.pop()
            yield cursor, until, names
            cursor = until
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
        cursor = until


def _extent(events: Iterable[Event]) -> Intervals:
    """Interval from the first event to the last; empty without events."""
    timed = [_interval(e) for e in events if e.get("ph") == "X" and e.get("cat") != "Trace"]
    return [(min(t[0] for t in timed), max(t[1] for t in timed))] if timed else []


def _is_annotation(event: Event) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation"


def _interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _correlation(event: Event) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def _seconds(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals) / 1e6


def tables(found: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Return the tables of a `breakdown`, each as (head, rows): kinds of work, spans, and `memory` by category.

    Times are milliseconds per step. The first column holds names, the others numbers.

        for head, rows in tables(json.loads(path.read_text())):
            print(head, rows)
    """
    steps, total = found["steps"], found["seconds"]
    times = {_LABELS[kind]: seconds for kind, seconds in found["kinds"].items()}
    times["step"] = total
    times["communication, hidden under these"] = found["communication_hidden"]
    rows = [
        [label, _milliseconds(seconds, steps), f"{seconds / total:.1%}" if total else "-"]
        for label, seconds in times.items()
    ]
    parts = [([f"work on {found['device']}", "ms a step", "share"], rows)]

    if found["spans"]:
        names = ["host_seconds", "device_seconds", "idle_seconds"]
        spans = [
            [name, f"{s['count'] / steps:.3g}", *(_milliseconds(s[n], steps) for n in names)]
            for name, s in sorted(found["spans"].items(), key=lambda i: -i[1]["host_seconds"])
        ]
        parts.append((["span", "times a step", "host, ms", "device, ms", "device idle, ms"], spans))
    if found.get("memory"):
        sizes = [[_MEMORY.get(k, k), f"{size / 2**20:.2f}"] for k, size in found["memory"].items()]
        parts.append((["memory", "MiB"], sizes))
    return parts


def markdown(found: Mapping[str, Any]) -> str:
    """Return the `tables` in Markdown.

    print(markdown(breakdown(read_trace(path))))
    """
    text = [f"{found['steps']} steps on {found['device']}"]
    for head, rows in tables(found):
        ruler = ["---"] + ["---:"] * (len(head) - 1)
        text.append("\n".join(f"| {' | '.join(row)} |" for row in [head, ruler, *rows]))
    return "\n\n".join(text) + "\n"


def _milliseconds(seconds: float, steps: int) -> str:
    return f"{seconds / steps * 1e3:.3f}"


def union(intervals: Iterable[Interval]) -> Intervals:
    """Instants in any of `intervals`, which may overlap and come in any order."""
    found: Intervals = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Instants in both. Cost: the length of the lists."""
    found: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Instants in `a` and not in `b`."""
    if not a:
        return []
    # a without b is a within the gaps of b
    ends = [a[0][0], *(end for _, end in b)]
    starts = [*(start for start, _ in b), a[-1][1]]
    gaps = [(end, min(start, a[-1][1])) for end, start in zip(ends, starts)]
    return intersect(a, [gap for gap in gaps if gap[0] < gap[1]])
