"""The lives of runs as a strip, and where their seconds went, as data for plotly.js."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from forge_resilience.goodput import CAUSES, Goodput, Ledger, Span

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
#: Marks above a strip: name, symbol, color, and the events that it stands for.
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
Parts = Mapping[str, tuple[Ledger, Sequence[Mapping[str, Any]]]]


def strip(parts: Parts) -> dict[str, Any] | None:
    """The strip of each run by its ledger and events, each from its own start on; None without a span."""
    parts = {name: part for name, part in parts.items() if part[0].spans}
    if not parts:
        return None
    longest = max(ledger.wall_ms for ledger, _ in parts.values()) / 1000
    divisor, unit = next(((d, u) for least, d, u in _UNITS if longest >= least), (1, "seconds"))
    traces: list[dict[str, Any]] = []
    cells = {name: _cells(ledger) for name, (ledger, _) in parts.items()}
    for cause, text in CAUSES.items():
        bars = [
            (i, (span.begin - cells[name][0].begin) / 1000, (span.end - span.begin) / 1000)
            for i, name in enumerate(parts)
            for span in cells[name]
            if span.cause == cause
        ]
        if bars:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": cause,
                    "width": 0.42,
                    "marker": {"color": _COLORS[cause], "line": {"width": 0}},
                    "y": [i for i, _, _ in bars],
                    "base": [begin / divisor for _, begin, _ in bars],
                    "x": [seconds / divisor for _, _, seconds in bars],
                    "text": [f"{seconds:.3g} s" for _, _, seconds in bars],
                    "textposition": "none",
                    "hovertemplate": f"{cause}: {text}<br>%{{text}}<extra></extra>",
                }
            )
    traces += [trace for mark in _MARKS if (trace := _marks(mark, parts, divisor)) is not None]
    return {
        "id": "lives",
        "title": "Lives",
        "unit": f"{unit} since the start of the run",
        "note": "Each strip is a run from its first start to its last sign of life; what happened is marked below it. Drag to see a part.",
        "labels": [html.escape(name) for name in parts],
        "height": 190 + 90 * len(parts),
        "traces": traces,
    }


def _cells(ledger: Ledger) -> list[Span]:
    """The spans; of a run with very many the longest cause of each of as many cells."""
    spans = list(ledger.spans)
    if len(spans) <= _MOST:
        return spans
    first, cell = spans[0].begin, max(1, ledger.wall_ms // _MOST)
    shares: dict[int, dict[str, int]] = {}
    for span in spans:
        for k in range((span.begin - first) // cell, (span.end - 1 - first) // cell + 1):
            begin, end = max(span.begin, first + k * cell), min(span.end, first + (k + 1) * cell)
            share = shares.setdefault(k, {})
            share[span.cause] = share.get(span.cause, 0) + end - begin
    cells: list[Span] = []
    for k, share in sorted(shares.items()):
        cause, begin = max(share, key=lambda c: share[c]), first + k * cell
        if cells and cells[-1].cause == cause:
            begin = cells.pop().begin
        cells.append(Span(begin, first + (k + 1) * cell, cause, 1))
    return cells


def _marks(mark: Any, parts: Parts, divisor: int) -> dict[str, Any] | None:
    name, symbol, color, kinds = mark
    found = [
        (i, (at - ledger.spans[0].begin / 1000) / divisor, _words(event))
        for i, (ledger, events) in enumerate(parts.values())
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


def _words(event: Mapping[str, Any]) -> str:
    """An event for a hover box: its name, step and cause."""
    told = [f"{key} {event[key]}" for key in ("step", "to_step", "cause", "signal") if key in event]
    return html.escape(", ".join([str(event["event"]), *told])[:200])


def _seconds(value: Any) -> float | None:
    try:
        found = datetime.fromisoformat(value)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def shares(found: Mapping[str, Goodput]) -> dict[str, Any]:
    """A bar of each run: the share of the wall clock that each cause has."""
    names = [html.escape(name) for name in found]
    return {
        "id": "shares",
        "title": "Where the time went",
        "unit": "share of the wall clock",
        "note": "Green is work that the run kept.",
        "labels": names,
        "height": 150 + 60 * len(names),
        "traces": [
            {
                "type": "bar",
                "orientation": "h",
                "name": cause,
                "width": 0.6,
                "marker": {"color": _COLORS[cause]},
                "y": list(range(len(names))),
                "x": [g.seconds[cause] / (g.wall_seconds or 1) for g in found.values()],
                "hovertemplate": f"{cause}: {text}<br>%{{x:.2%}}<extra></extra>",
            }
            for cause, text in CAUSES.items()
            if any(g.seconds[cause] for g in found.values())
        ],
    }
