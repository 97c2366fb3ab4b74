"""Plots of a report, as data for plotly.js: the columns of each plot, and the rows of a long run that are drawn."""

from __future__ import annotations

import contextlib
import html
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy

from forge_train import Run, column_of

#: Points of one curve, and of all known and all other curves of a page.
_MOST_DRAWN, _FEWEST_DRAWN, _KNOWN_DRAWN, _OTHER_DRAWN = 2_000, 200, 100_000, 30_000
_MOST_CURVES = 40  # in one plot
_PALETTE = (
    *("#3b82c4", "#e0762f", "#2f9e6e", "#c64f8b", "#8a6fd1", "#b0962b", "#4aa8b8", "#d14d4d"),
)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
#: The first plots, in this order: title, unit of y, pattern of columns, note.
_KNOWN = (
    ("Loss", "nats per token", r"loss|val_loss|eval/.*/loss", "Lower is better. loss is of the training batches, "
     "val_loss and eval/NAME/loss of rows that training never sees. A gap in loss is a value that was not finite."),
    ("Perplexity", "", r"eval/.*/perplexity", "e to the loss."),
    ("Bits per byte", "bits", r"val_bits_per_byte|eval/.*/bits_per_byte", "Loss by the bytes of the text: comparable between tokenizers."),
    ("Accuracy", "fraction", r"eval/.*", "Fraction of questions with the right answer."),
    ("Learning rate", "", r"lr", "Before the factors of groups of parameters."),
    ("Gradient norm", "", r"grad_norm", "Before clipping; a gap is a value that was not finite."),
    ("Skipped steps", "steps", r"skipped_steps", "Steps without an update since the row before: loss or gradient were not usable."),
    ("Throughput", "tokens per second", r"tokens_per_second", "Of training only, on all ranks; without evaluation and saving."),
    ("MFU", "fraction", r"mfu", "Model FLOPs utilization: operations by the formula over the peak of the devices."),
    ("Waiting for data", "seconds", r"data_wait_seconds", "Of rank 0, since the row before."),
    ("Memory", "bytes", r"memory_bytes", "Peak of tensors on an accelerator; on a CPU that of the process."),
)  # fmt: skip
_MAIN = 7  # of them are about learning, the others about speed
_FROM_ZERO = ("lr", "tokens_per_second", "mfu", "data_wait_seconds", "memory_bytes")
_X = {"step": "step", "tokens": "tokens", "flops": "flops", "seconds": "hours"}
_NOT_DRAWN = {*_X, "schema", "seconds_left"}


class Curves:
    """Plots of the columns of runs.

        curves = Curves({"a": read_run("runs/a")})
        curves.learning, curves.speed, curves.others        # plots
        curves.axes                                         # x values that the traces name by number

    A plot is a dict of `id`, `title`, `note`, `unit` and `traces`; a trace is one of plotly.js whose x is
    `axes[trace["axis"]]`, {step, tokens, flops, hours}. A curve of more than `points` rows is thinned to them (less
    known ones to fewer): of each section of the run its smallest and its largest value, and the first that is missing.
    """

    def __init__(self, runs: dict[str, Run]) -> None:
        self._runs = runs
        self.axes: list[dict[str, list[Any]]] = []
        self._axis_of: dict[tuple[str, tuple[int, ...]], int] = {}
        self._x = {name: _x_values(run.metrics) for name, run in runs.items()}
        self._values = {
            (name, column): floats(values)
            for name, run in runs.items()
            for column, values in run.metrics.items()
            if column not in _NOT_DRAWN
        }

        # columns with a number in any row
        some = (column for (_, column), v in self._values.items() if not numpy.isnan(v).all())
        names = list(dict.fromkeys(some))
        known = [n for n in names if any(re.fullmatch(pattern, n) for _, _, pattern, _ in _KNOWN)]
        self.points = self._drawn_each(_KNOWN_DRAWN, known)
        self.thinned = any(len(r.metrics.get("step", ())) > self.points for r in runs.values())

        plots, taken = [], set[str]()
        for title, unit, pattern, note in _KNOWN:
            columns = [n for n in known if n not in taken and re.fullmatch(pattern, n)]
            taken |= set(columns)
            plots.append(self._plot(title, unit, note, columns, self.points))
        self.learning = [p for p in plots[:_MAIN] if p["traces"]]
        self.speed = [p for p in plots[_MAIN:] if p["traces"]]

        others = [name for name in names if name not in taken]
        points = self._drawn_each(_OTHER_DRAWN, others)
        groups: dict[str, list[str]] = {}
        for name in others:
            groups.setdefault(_group(name), []).append(name)
        self.others = [self._other(title, columns, points) for title, columns in groups.items()]

    def _drawn_each(self, points: int, names: Sequence[str]) -> int:
        """Divide a number of points among the curves of these columns of all runs."""
        return max(_FEWEST_DRAWN, min(_MOST_DRAWN, points // (len(names) * len(self._runs) or 1)))

    def _other(self, title: str, columns: Sequence[str], points: int) -> dict[str, Any]:
        """The plot of a group of columns, with unit and meaning from the list of columns."""
        entry = column_of(columns[0])
        if entry is None:
            return self._plot(title, "", "", columns, points)
        meaning = f"{entry.meaning[:1].upper()}{entry.meaning[1:]}."
        return self._plot(title, entry.unit, meaning, columns, points)

    def _plot(
        self, title: str, unit: str, note: str, columns: Sequence[str], points: int
    ) -> dict[str, Any]:
        pairs = [(r, name) for name in columns for r in self._runs if self._is_drawn(r, name)]
        if len(pairs) > _MOST_CURVES:
            note = f"{note} The first {_MOST_CURVES} of {len(pairs)} curves.".strip()
        return {
            "id": "-".join(re.findall(r"[a-z0-9]+", title.lower())),
            "title": title,
            "unit": unit,
            "note": note,
            "from_zero": any(name in _FROM_ZERO for name in columns),
            "traces": [self._trace(*pair, columns, points) for pair in pairs[:_MOST_CURVES]],
        }

    def _is_drawn(self, run: str, name: str) -> bool:
        """Whether the run has a value of the column; skipped steps are drawn if there are any."""
        values = self._values.get((run, name), floats(()))
        return bool((values > 0).any() if name == "skipped_steps" else (~numpy.isnan(values)).any())

    def _trace(self, run: str, name: str, columns: Sequence[str], points: int) -> dict[str, Any]:
        """The curve of a column of a run, which has a value of it."""
        values = self._values[run, name]
        some = numpy.flatnonzero(~numpy.isnan(values))
        # evaluations leave no gaps: rows between them have no value by design
        sparse = name.startswith(("val_", "eval/")) or 2 * len(some) <= len(values) + 1
        without_gaps = sparse or name.startswith("gradient.")
        rows = thin(values, some if without_gaps else range(some[0], len(values)), points)

        given = self._runs[run].metrics[name]  # `values` are floats, these may be integers
        several = len(self._runs) > 1
        index, of_run = columns.index(name), list(self._runs).index(run)
        label = f"{run}: {name}" if several and len(columns) > 1 else run if several else name
        round_ = index // len(_PALETTE)
        return {
            "type": "scatter",
            "name": html.escape(label),
            "mode": "lines+markers" if len(rows) <= 60 else "lines",
            "marker": {"size": 5},
            # several runs: a color each, columns differ in dashes; one run: the other way round
            "line": {
                "color": _PALETTE[(of_run if several else index) % len(_PALETTE)],
                "dash": _DASHES[(index if several else round_) % len(_DASHES)],
                "width": 2 if sparse or len(rows) <= 300 else 1.3,
            },
            "y": [number(given[i]) for i in rows],
            "axis": self._axis(run, tuple(rows)),
            "sparse": sparse,
        }

    def _axis(self, run: str, rows: tuple[int, ...]) -> int:
        """Number of the x values of these rows, which curves with the same rows use together."""
        if (run, rows) not in self._axis_of:
            self._axis_of[run, rows] = len(self.axes)
            self.axes.append({axis: [x[i] for i in rows] for axis, x in self._x[run].items()})
        return self._axis_of[run, rows]


def _x_values(metrics: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The x values of all rows, by axis."""
    rows = metrics.get("step", ())
    found = {a: [number(v) for v in metrics.get(c, [None] * len(rows))] for c, a in _X.items()}
    found["hours"] = [None if s is None else round(s / 3600, 7) for s in found["hours"]]
    return found


def thin(values: Any, rows: Any, most: int) -> list[int]:
    """Choose at most `most` of the row numbers `rows`: the minimum, the maximum and the first gap of each section.

    `values` has a number for every row of the run, nan or None for a gap.
    """
    rows = numpy.asarray(rows)
    if len(rows) <= most:
        return [int(row) for row in rows]

    chosen = numpy.asarray(values, dtype=numpy.float64)[rows]
    sections = most // (3 if numpy.isnan(chosen).any() else 2)
    width = -(-len(rows) // sections)
    grid = numpy.full((sections, width), numpy.nan)
    grid.flat[: len(rows)] = chosen

    missing = numpy.isnan(grid)
    some, starts = ~missing.all(axis=1), width * numpy.arange(sections)
    lowest = starts + numpy.where(missing, numpy.inf, grid).argmin(axis=1)
    highest = starts + numpy.where(missing, -numpy.inf, grid).argmax(axis=1)
    gaps = (starts + missing.argmax(axis=1))[missing.any(axis=1)]
    kept = numpy.unique([*lowest[some], *highest[some], *gaps[gaps < len(rows)]])
    return [int(row) for row in rows[kept.astype(int)]]


def floats(values: Sequence[Any]) -> numpy.ndarray:
    """The finite numbers among values, and nan for anything else: float64 (len(values),)."""
    if {*map(type, values)} <= {int, float, type(None)}:
        with contextlib.suppress(OverflowError):  # an int beyond every float
            found = numpy.array(values, dtype=numpy.float64)
            found[numpy.isinf(found)] = numpy.nan
            return found
    numbers = [number(value) for value in values]
    return numpy.array([math.nan if n is None else n for n in numbers], dtype=numpy.float64)


def expert_plot(run: Run) -> dict[str, Any] | None:
    """A heat map of a run with MoE layers: the load of each expert, or else the load of each layer's fullest one.

    It is a plot without `id` and `title`, and with `height` and `edges`, the rows between two layers.
    """
    loads = {n: v for n, v in run.metrics.items() if re.fullmatch(r"moe\..*\.load", n)}
    labels: list[str] = []
    columns: list[numpy.ndarray] = []  # (rows, experts) of each layer
    edges = []
    for column, values in loads.items():
        columns.append(_matrix(values))
        edges.append(len(labels))
        labels += [f"layer {column[4:-5]}, expert {e}" for e in range(columns[-1].shape[1])]
    for column, values in {} if loads else run.metrics.items():
        if re.fullmatch(r"moe\..*\.max_load", column):
            labels.append(f"layer {column[4:-9]}")
            columns.append(floats(values)[:, None])
    if not labels:
        return None

    steps = [number(step) for step in run.metrics["step"]]
    sections = min(len(steps), max(20, min(200, 100_000 // len(labels))))
    bounds = [k * len(steps) // sections for k in range(sections + 1)]
    subject = "expert" if loads else "layer's fullest expert"
    note = (
        f"Tokens of each {subject} over the mean of its layer: 1 is even, 0 (dark blue) is an expert that nothing reaches, red "
        "is twice the mean or more."
    )
    if sections < len(steps):
        note += f" Each of {sections} columns is the mean of its rows."
    if not loads:
        note += " With metrics.expert_loads = true a run keeps the load of every expert."

    return {
        "note": note,
        "unit": "",
        "height": max(260, min(1400, 90 + 14 * len(labels))),
        "edges": edges[1:],
        "traces": [
            {
                "type": "heatmap",
                "x": [steps[b - 1] for b in bounds[1:]],
                "y": [html.escape(label) for label in labels],
                "z": [row for column in columns for row in _means(column, bounds)],
                "zmin": 0,
                "zmax": 2,
                "colorscale": [[0, "#16427d"], [0.25, "#6ba3d6"], [0.5, "#e9e7e1"], [0.75, "#e58a5f"], [1, "#a51626"]],
                "colorbar": {"thickness": 12, "title": {"text": "load / mean", "side": "right"}},
                "hovertemplate": "%{y}<br>step %{x}: %{z:.3f}<extra></extra>",
            }
        ],
    }  # fmt: skip


def number(value: Any) -> float | None:
    """A finite number as it is; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an int beyond every float
        return None


def _matrix(values: Sequence[Any]) -> numpy.ndarray:
    """Stack lists of numbers, as `floats` makes them, into (len(values), length of the longest), padded with nan."""
    lists = [value if isinstance(value, numpy.ndarray) else floats(()) for value in values]
    found = numpy.full((len(lists), max(map(len, lists), default=0)), numpy.nan)
    for row, value in zip(found, lists, strict=True):
        row[: len(value)] = value
    return found


def _means(column: numpy.ndarray, bounds: Sequence[int]) -> list[list[float | None]]:
    """Means of the rows of each section, by expert; None where a section has no number."""
    sections = [column[a:b] for a, b in itertools.pairwise(bounds)]
    counts = numpy.array([(~numpy.isnan(section)).sum(axis=0) for section in sections])
    sums = numpy.array([numpy.nansum(section, axis=0, dtype=numpy.float64) for section in sections])
    means = (sums / numpy.maximum(counts, 1)).round(4)
    return [
        [value if count else None for value, count in zip(*of_expert)]
        for of_expert in zip(means.T.tolist(), counts.T.tolist())
    ]


def _group(name: str) -> str:
    """The title of a column's plot: columns of one entry in the list of columns, as `moe.1.dead`, have one plot.

    Other columns by their names: `mine.1.x` and `mine.2.x` are mine.*.x, `mine.a` is mine.*.
    """
    entry = column_of(name)
    if entry is not None:
        return entry.name
    words = re.split(r"([./])", name)
    if any(word.isdecimal() for word in words):
        return "".join("*" if word.isdecimal() else word for word in words)
    return name if len(words) == 1 else "".join([*words[:-1], "*"])
