"""Attention as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_core._shared.problems import invalid

_FORMATS = (".png", ".svg", ".pdf")
#: Inches of a labelled token, and the most tokens that are labelled one by one.
_INCHES, _LABELLED = 0.15, 64
_COLUMNS = 4


def draw_attention(
    weights: Tensor,
    path: str | Path,
    *,
    labels: Sequence[str] = (),
    key_labels: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    title: str = "",
) -> None:
    """Write a picture of attention weights (H, S, T) of one row: a square for each head, a line for each query.

        draw_attention(store["layers.3.attn_weights"][0], "layer3.png", labels=texts, title="layer 3")

    `labels` are the texts of the S tokens, of which 64 or fewer are written; `key_labels` those of the T keys, by default
    the same. `heads` chooses some. All heads have one scale of colors, from 0 to their largest weight; what is 0, as later
    tokens are, is grey. The suffix is .png, .svg or .pdf. Needs matplotlib (`forge-train-core[plot]`).

    Raises ValueError for other shapes, labels of another number and another suffix, ImportError without matplotlib.
    """
    path, texts = Path(path), (labels, labels if key_labels is None else key_labels)
    _check(weights, path, texts)
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "draw_attention needs matplotlib, which is not installed; pip install 'forge-train-core[plot]'"
        ) from error
    numbers = list(range(len(weights)) if heads is None else heads)
    shown = weights.detach().float().cpu()[numbers]  # (N, S, T)
    rows = -(-len(numbers) // _COLUMNS)
    columns = -(-len(numbers) // rows)
    named = bool(labels) and max(shown.shape[1:]) <= _LABELLED
    wide, high = (max(2.0, _INCHES * size) if named else 2.6 for size in shown.shape[:0:-1])
    # room for labels outside, and for the title and scale
    size = (columns * (wide + 0.2) + 1.8, rows * (high + 0.4) + 1.2)
    figure: Any = Figure(figsize=size, layout="constrained")
    squares = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for i, (square, number, values) in enumerate(zip(squares, numbers, shown)):
        seen = values.where(values > 0, torch.nan).numpy()
        image = square.imshow(seen, cmap="Blues", vmin=0.0, vmax=float(shown.max()))
        square.set_facecolor("0.9")
        square.xaxis.set_tick_params(labelbottom=i + columns >= len(numbers))
        square.set_title(f"head {number}", fontsize=9)
        square.set_aspect("auto" if shown.size(1) != shown.size(2) else "equal")
        for axis, words, rotation in (
            (square.yaxis, texts[0], 0),
            (square.xaxis, texts[1], 90),
        ):
            if named:
                axis.set_ticks(range(len(words)), [_visible(word) for word in words],
                               fontsize=7, rotation=rotation, parse_math=False)  # fmt: skip
            else:
                axis.set_tick_params(labelsize=7)
    for square in squares[len(numbers) :]:
        square.set_axis_off()
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("key: the token that is looked at", fontsize=9)
    figure.supylabel("query: the token that looks", fontsize=9)
    figure.colorbar(image, ax=list(squares), label="attention weight", fraction=0.03, shrink=0.6)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "forge"}):
        figure.savefig(path, dpi=150)


def _check(weights: Tensor, path: Path, texts: tuple[Sequence[str], Sequence[str]]) -> None:
    if weights.dim() != 3 or not weights.numel():
        rule = "must be (heads, queries, keys) of one row"
        raise invalid("weights", "shape", tuple(weights.shape), rule, "take one: weights[0]")
    for name, words, size in zip(("labels", "key_labels"), texts, weights.shape[1:], strict=True):
        if words and len(words) != size:
            rule = f"is the number of labels, and must be one for each of the {size} tokens"
            raise invalid(name, "length", len(words), rule)
    if path.suffix not in _FORMATS:
        fix = f"use {path.stem}.png"
        raise invalid("path", "suffix", str(path), "must end in .png, .svg or .pdf", fix)


def _visible(text: str) -> str:
    """A token's text, in which white space can be seen."""
    return text.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "\u00b7")
