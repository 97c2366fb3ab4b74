"""Where the seconds of a run went: `forge-train goodput`, and the figures about time of a report, for plotly.js."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forge_lab._shared.problems import invalid
from forge_resilience import read_events
from forge_resilience.goodput import (
    CAUSES,
    Goodput,
    GoodputTable,
    Interval,
    goodput,
    read_goodput_table,
)
from forge_train import RunDirectory, read_rows
from forge_train.errors import ConfigError

_COLORS = {
    "steps": "#2f9e6e",
    "recompute": "#e0a030",
    "start": "#7aa6d8",
    "load": "#3b6fb0",
    "save": "#8a6fd1",
    "evaluate": "#4ab5b8",
    "profile": "#b07a4f",
    "hung": "#d14d4d",
    "down": "#8f2d2d",
    "queue": "#a3a3a3",
    "idle": "#cfcfcf",
}
#: Marks of a strip: name, symbol, color, and the events that they show.
_MARKS = (
    ("start or resume", "triangle-right", "#3b6fb0", ("start", "resume", "restart")),
    ("save", "line-ns-open", "#8a6fd1", ("save",)),
    ("stop on request", "square", "#7d7d7d", ("stop",)),
    ("skipped step", "circle-open", "#e0762f", ("skip", "spike")),
    ("rollback", "triangle-left", "#e0762f", ("rollback",)),
    ("fault", "x", "#d14d4d", ("fault", "hang", "stall", "no_progress", "mismatch", "health", "data_worker_lost", "save_failed", "quarantine")),
    ("done", "star", "#2f9e6e", ("done",)),
)  # fmt: skip
_MOST = 1000  # spans of a strip, and marks of a kind
_UNITS = ((2 * 86_400, 86_400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"))
#: GoodputTable and events of each run.
Records = Mapping[str, tuple[GoodputTable, Sequence[Mapping[str, Any]]]]


def read_run_ledger(paths: RunDirectory, events: Iterable[Mapping[str, Any]]) -> GoodputTable:
    """The ledger of a run's seconds; its last sign of life is the last row of metrics."""
    last_sign = paths.metrics.stat().st_mtime if paths.metrics.exists() else None
    return read_goodput_table(events, last_sign)


def run_goodput(run_dir: str | Path) -> Goodput:
    """Return where the seconds of a run went, over all of its restarts; also for a run that is still training.

    Raises ConfigError when `run_dir` has no journal.
    """
    paths = RunDirectory(run_dir)
    if not paths.events.exists():
        rule, fix = f"has no {paths.events.name}", "name the folder of a run that was started once"
        raise invalid("run", "not_found", str(run_dir), rule, fix, kind=ConfigError)
    return goodput(read_run_ledger(paths, read_events(paths.events)))


def data_wait_seconds(run_dir: str | Path) -> float | None:
    """Seconds that rank 0's steps waited for data, summed over the rows of a run; None without a row."""
    rows = read_rows(RunDirectory(run_dir).metrics)
    waits = [row["data_wait_seconds"] for row in rows if row.get("data_wait_seconds") is not None]
    return sum(waits) if waits else None


def print_goodput(run_dir: Path, as_json: bool) -> None:
    """Print the goodput of a run, for a person or as one JSON object."""
    found, waited = run_goodput(run_dir), data_wait_seconds(run_dir)
    if as_json:
        print(json.dumps({**asdict(found), "data_wait_seconds": waited}))
        return
    print("\n".join(found.lines()))
    if waited is not None:
        print(f"of the steps {waited:.3f} s were waiting for data")


# ---- figures of a report


def strip(records: Records) -> dict[str, Any] | None:
    """A strip of causes over time for each run, from its own start on; None without a span."""
    records = {name: record for name, record in records.items() if record[0].spans}
    if not records:
        return None
    longest = max(ledger.wall_ms for ledger, _ in records.values()) / 1000
    divisor, unit = next(((d, u) for least, d, u in _UNITS if longest >= least), (1, "seconds"))

    traces: list[dict[str, Any]] = []
    cells = {name: _cells(ledger) for name, (ledger, _) in records.items()}

    for cause, text in CAUSES.items():
        bars = [
            (i, (span.begin - cells[name][0].begin) / 1000, (span.end - span.begin) / 1000)
            for i, name in enumerate(records)
            for span in cells[name]
            if span.cause == cause
        ]

        if bars:
            traces.append(
                {
                    **_bar(cause, 0.42, f"{cause}: {text}<br>%{{text}}"),
                    "y": [i for i, _, _ in bars],
                    "base": [begin / divisor for _, begin, _ in bars],
                    "x": [seconds / divisor for _, _, seconds in bars],
                    "text": [f"{seconds:.3g} s" for _, _, seconds in bars],
                    "textposition": "none",
                }
            )

    traces += [trace for mark in _MARKS if (trace := _marks(mark, records, divisor)) is not None]
    return {
        "id": "lives",
        "title": "Attempts",
        "unit": f"{unit} since the start of the run",
        "note": "Each strip is a run from its first start to its last sign of life; events are marked below it. Drag to zoom in.",
        "labels": [html.escape(name) for name in records],
        "height": 190 + 90 * len(records),
        "traces": traces,
    }


def shares(found: Mapping[str, Goodput]) -> dict[str, Any]:
    """A bar for each run: the fraction of the wall clock that each cause takes."""
    names = [html.escape(name) for name in found]
    return {
        "id": "shares",
        "title": "Where the time went",
        "unit": "fraction of the wall clock",
        "note": "Green is work that the run kept.",
        "labels": names,
        "height": 150 + 60 * len(names),
        "traces": [
            {
                **_bar(cause, 0.6, f"{cause}: {text}<br>%{{x:.2%}}"),
                "y": list(range(len(names))),
                "x": [g.seconds[cause] / (g.wall_seconds or 1) for g in found.values()],
            }
            for cause, text in CAUSES.items()
            if any(g.seconds[cause] for g in found.values())
        ],
    }


def _bar(cause: str, width: float, hover: str) -> dict[str, Any]:
    """The style of a cause's bars."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": cause,
        "width": width,
        "marker": {"color": _COLORS[cause], "line": {"width": 0}},
        "hovertemplate": f"{hover}<extra></extra>",
    }


def _cells(ledger: GoodputTable) -> list[Interval]:
    """The spans; for a run with more than `_MOST`, cells of equal length with the longest cause of each."""
    spans = list(ledger.spans)
    if len(spans) <= _MOST:
        return spans

    first, cell = spans[0].begin, max(1, ledger.wall_ms // _MOST)
    milliseconds: dict[int, dict[str, int]] = {}  # by cell and cause
    for span in spans:
        for k in range((span.begin - first) // cell, (span.end - 1 - first) // cell + 1):
            begin, end = max(span.begin, first + k * cell), min(span.end, first + (k + 1) * cell)
            causes = milliseconds.setdefault(k, {})
            causes[span.cause] = causes.get(span.cause, 0) + end - begin

    cells: list[Interval] = []
    for k, causes in sorted(milliseconds.items()):
        cause, begin = max(causes, key=lambda c: causes[c]), first + k * cell
        if cells and cells[-1].cause == cause:
            begin = cells.pop().begin
        cells.append(Interval(begin, first + (k + 1) * cell, cause, 1))
    return cells


def _marks(mark: Any, records: Records, divisor: int) -> dict[str, Any] | None:
    """The trace of one kind of marks; None where no run has such an event."""
    name, symbol, color, kinds = mark
    found = [
        (i, (at - ledger.spans[0].begin / 1000) / divisor, _hover_text(event))
        for i, (ledger, events) in enumerate(records.values())
        for event in events
        if event.get("event") in kinds and (at := _seconds(event.get("time"))) is not None
    ]
    if not found:
        return None

    found = found[:: -(-len(found) // _MOST)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "marker": {"symbol": symbol, "color": color, "size": 9, "line": {"width": 1.5, "color": color}},
        "x": [x for _, x, _ in found],
        "y": [i + 0.34 for i, _, _ in found],
        "text": [text for _, _, text in found],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _hover_text(event: Mapping[str, Any]) -> str:
    """Name, step and cause of an event."""
    fields = [f"{k} {event[k]}" for k in ("step", "to_step", "cause", "signal") if k in event]
    return html.escape(", ".join([str(event["event"]), *fields])[:200])


def _seconds(value: Any) -> float | None:
    try:
        found = datetime.fromisoformat(value)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
