"""Draw the diagrams of the documents as SVG, the same bytes each time: hatch run dev:python scripts/write_diagrams.py

Writes docs/NAME.svg for each diagram of `DIAGRAMS`, for readers of the repository. The site draws them again, in a light
and a dark variant (scripts/docs_hooks.py). Texts stay texts, so they can be searched and compared.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

DOCS = Path(__file__).resolve().parent.parent / "docs"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "forge",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
}


class Palette(NamedTuple):
    """Colors of a variant; `fills` has one for each package."""

    paper: str  # "none": transparent
    ink: str
    faint: str
    fills: dict[str, str]


LIGHT = Palette(
    "white",
    "#1f2430",
    "#5c6370",
    {
        "forge_lab": "#f0e8dc",
        "forge_train": "#e4e7ee",
        "forge_core": "#d6e4ff",
        "forge_vlm": "#d9d6fb",
        "forge_moe": "#f6d9ec",
        "forge_parallel": "#d5f0e3",
        "forge_data": "#fdeecb",
        "forge_ckpt": "#fbdcd0",
        "forge_resilience": "#d3eef4",
        "torch": "#f2f3f5",
    },
)
DARK = Palette(
    "none",
    "#e8eaf0",
    "#a7aebd",
    {
        "forge_lab": "#4d4436",
        "forge_train": "#3a4152",
        "forge_core": "#1f3f75",
        "forge_vlm": "#433b80",
        "forge_moe": "#6a2f57",
        "forge_parallel": "#1f5a43",
        "forge_data": "#66511a",
        "forge_ckpt": "#713a26",
        "forge_resilience": "#1d5663",
        "torch": "#2c313d",
    },
)

#: (package, what it holds, x, y, width, height): a box rests on the boxes that it imports.
_PACKAGES = [
    ("forge_lab", "finished runs: evaluations, reports, replays, studies", 0, 4, 6, 0.8),
    ("forge_train", "the runner: a run is one TOML file", 0, 3, 6, 1),
    ("forge_vlm", "vision-language\nmodels", 0, 2, 1, 1),
    ("forge_core", "transformers,\nlosses, optimizers", 0, 1, 1, 1),
    ("forge_moe", "mixtures\nof experts", 1, 1, 1, 2),
    ("forge_parallel", "layouts of ranks,\nplanner", 2, 1, 1, 2),
    ("forge_data", "token files,\nglobal order,\npacking", 3, 1, 1, 2),
    ("forge_ckpt", "atomic, verified\ncheckpoints", 4, 1, 1, 2),
    ("forge_resilience", "votes, signals,\nhealth, Slurm", 5, 1, 1, 2),
    ("torch", "", 0, 0.4, 6, 0.6),
]
#: (package, step, detail), in the order of a training step.
_STEPS = [
    ("forge_data", "Global order", "of samples, the same\nfor any number of ranks"),
    ("forge_data", "Part of the rank", "read and packed\ninto sequences"),
    ("forge_resilience", "Label count, votes", "one reduction\nover all ranks"),
    ("forge_core", "Forward, backward", "loss sum of the rank\n/ global label count"),
    ("forge_parallel", "Gradients", "of the global batch,\nsummed over ranks"),
    ("forge_parallel", "Norm and loss", "one reduction,\nthen clip"),
    ("forge_core", "Optimizer step", "skipped by all ranks\nif numbers are bad"),
    ("forge_ckpt", "Checkpoint", "for any layout\nof ranks"),
]


_BATCH = [
    ("forge_data", "Order", "cursor to sample numbers,\npermutation to rows"),
    ("forge_data", "Read", "packed rows,\ndigests compared"),
    ("forge_data", "Fill", "padding for short ranks\nand failed reads"),
    ("forge_resilience", "Vote", "label count, stop, faults,\nduring the forward"),
    ("forge_parallel", "Forward, backward", "sum of losses\n/ global label count"),
    ("forge_parallel", "Norm", "one all-reduce,\nthen clip"),
    ("forge_core", "Update", "masked on all ranks\nif numbers are bad"),
    ("forge_train", "Row", "to the host while\nthe next step runs"),
]
_CHECKPOINT = [
    ("forge_train", "Decide", "all ranks alike,\nafter a check of numbers"),
    ("forge_ckpt", "Plan", "each tensor once,\ntemporary folder"),
    ("forge_ckpt", "Copy", "to host memory;\ntraining goes on"),
    ("forge_ckpt", "Write", "data files, a digest\nfor each block, fsync"),
    ("forge_ckpt", "Manifest", "after the data\nof all ranks, fsync"),
    ("forge_ckpt", "Rename", "to the final name,\nfsync of the store"),
    ("forge_ckpt", "Retention", "the step is read back,\nolder ones are removed"),
    ("forge_train", "Announce", "event and votes"),
]
_STOP = [
    ("forge_resilience", "Signal", "from Slurm, a terminal\nor a user"),
    ("forge_resilience", "Flag", "set by the handler,\none line printed"),
    ("forge_resilience", "Vote", "one rank is enough,\nall stop at one step"),
    ("forge_ckpt", "Save", "committed before\nthe ranks end"),
    ("forge_train", "Exit", "75 on all ranks"),
    ("forge_resilience", "Judge", "by the code: again,\nwithout a node, or end"),
    ("forge_resilience", "Requeue", "the same command"),
    ("forge_ckpt", "Resume", "newest checkpoint,\nany number of ranks"),
]


def architecture(dark: bool = False) -> str:
    """The packages in their layers, and below them the way of a batch through a training step."""
    colors = DARK if dark else LIGHT
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 7.9))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set(xlim=(0, 6), ylim=(-3.8, 5.3))
        axes.set_axis_off()
        _draw_packages(axes, colors)
        _draw_steps(axes, "A training step", _STEPS, colors)
        return _svg(figure, colors)


def life(title: str, steps: list[tuple[str, str, str]], dark: bool = False) -> str:
    """Eight steps in two rows."""
    colors = DARK if dark else LIGHT
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 3.25))
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set(xlim=(0, 6), ylim=(-3.8, -0.05))
        axes.set_axis_off()
        _draw_steps(axes, title, steps, colors)
        return _svg(figure, colors)


def _svg(figure: Figure, colors: Palette) -> str:
    target = io.StringIO()
    figure.savefig(target, format="svg", facecolor=colors.paper, metadata={"Date": None})
    return target.getvalue()


def _draw_packages(axes: Any, colors: Palette) -> None:
    _title(axes, 5.2, "Packages", "A box imports only boxes below it.", colors)
    for package, text, *place in _PACKAGES:
        _box(axes, place, package, text, colors.fills[package], colors)


def _draw_steps(axes: Any, title: str, steps: list[tuple[str, str, str]], colors: Palette) -> None:
    """Two rows of four boxes, with arrows between them."""
    _title(axes, -0.15, title, "The color is that of the package.", colors)
    width, gap = 1.3, (6 - 4 * 1.3) / 3
    for number, (package, step, text) in enumerate(steps):
        row, column = divmod(number, 4)
        x, y = column * (width + gap), -1.85 - 1.9 * row
        _box(axes, [x, y, width, 1.3], f"{number + 1}. {step}", text, colors.fills[package], colors)
        if column < 3:
            _arrow(axes, [(x + width, y + 0.65), (x + width + gap, y + 0.65)], colors)
    # From the end of the first row to the start of the second.
    left, right = width / 2, 6 - width / 2
    _arrow(axes, [(right, -1.85), (right, -2.15), (left, -2.15), (left, -2.45)], colors)


def _title(axes: Any, y: float, title: str, text: str, colors: Palette) -> None:
    axes.text(0.02, y, title, fontsize=12, fontweight="bold", color=colors.ink, va="top")
    axes.text(5.98, y, text, fontsize=9, color=colors.faint, va="top", ha="right")


def _box(axes: Any, place: list[float], name: str, text: str, fill: str, colors: Palette) -> None:
    """A box with a bold name, and below it its text in smaller letters."""
    x, y, width, height = place
    gap = 0.03
    axes.add_patch(
        FancyBboxPatch(
            (x + gap, y + gap), width - 2 * gap, height - 2 * gap,
            boxstyle="round,pad=0,rounding_size=0.06", facecolor=fill, edgecolor=colors.faint, linewidth=0.8,
        )
    )  # fmt: skip
    middle, top = x + width / 2, y + height / 2
    lines = len(text.splitlines())
    above = 0.11 * lines
    axes.text(middle, top + above, name, fontsize=9, fontweight="bold", color=colors.ink,
              ha="center", va="center")  # fmt: skip
    for number, line in enumerate(text.splitlines()):
        axes.text(middle, top + above - 0.26 - 0.215 * number, line, fontsize=8, color=colors.ink,
                  ha="center", va="center")  # fmt: skip


def _arrow(axes: Any, points: list[tuple[float, float]], colors: Palette) -> None:
    """A line through the points with a head at its end."""
    for start, end in pairwise(points[:-1]):
        axes.plot(*zip(start, end), color=colors.faint, linewidth=1.2, solid_capstyle="round")
    axes.add_patch(
        FancyArrowPatch(points[-2], points[-1], arrowstyle="-|>", mutation_scale=9, shrinkA=0, shrinkB=0,
                        color=colors.faint, linewidth=1.2)
    )  # fmt: skip


#: Name of the file in docs/, and the function that draws it.
DIAGRAMS: dict[str, Callable[..., str]] = {
    "architecture": architecture,
    "life-of-a-batch": partial(life, "Life of a batch", _BATCH),
    "life-of-a-checkpoint": partial(life, "Life of a checkpoint", _CHECKPOINT),
    "life-of-a-stop": partial(life, "Life of a stop", _STOP),
}


def main() -> None:
    for name, draw in DIAGRAMS.items():
        (DOCS / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(DOCS / f"{name}.svg")


if __name__ == "__main__":
    main()
