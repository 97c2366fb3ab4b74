"""Learning rates and batch over a run as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["draw_rates"]


def draw_rates(
    steps: Sequence[int],
    rates: Mapping[str, Sequence[float]],
    tokens: Sequence[int],
    path: str | Path,
) -> None:
    """Write a picture of the learning rates of groups, by name, and of the tokens per step below them.

    All have a number for each of `steps`. Needs matplotlib (`forge-train-core[plot]`).
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    styles = itertools.cycle(("-", "--", ":", "-."))  # groups of one rate stay visible
    for (group, values), style in zip(rates.items(), styles):
        above.plot(steps, values, style, label=group)
    above.set_ylabel("learning rate")
    above.set_ylim(bottom=0)
    above.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    if len(rates) > 1:
        above.legend()

    below.plot(steps, tokens, color="black")
    below.set_ylabel("tokens per step")
    below.set_ylim(bottom=0, top=1.2 * max(tokens))
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "forge"}):
        figure.savefig(path, dpi=120)
