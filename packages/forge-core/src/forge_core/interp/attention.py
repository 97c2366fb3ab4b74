"""Attention weights of a model: their values, and plots of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.problems import invalid

_FORMATS = (".png", ".svg", ".pdf")
#: Inches of a labeled token, and the most tokens that are labeled one by one.
_INCHES, _LABELED = 0.15, 64
_COLUMNS = 4


@contextmanager
def attention_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Weights of each attention of a model in the last call: {module: (B, H, S, T) fp32 or wider, without graph}.

        with attention_weights(model) as weights:
            model(tokens)
        weights["layers.0.mixer"][:, :, -1]  # (B, H, T): the weights of the last query

    T counts the tokens of a sequence, or those of its images in a block of cross-attention. A matrix row sums to 1, to
    less with sinks, and to 0 if a token sees no image. The output of the model does not change.

    Covers modules with an `attend` that defines `weights(q, k, ctx, *sinks)`, in calls without a cache, and modules that
    define `attention_weights(x, ctx, cache)`. Raises ValueError for a model without any, or if ranks share the tokens of a
    sequence, so that none has all keys. Cost: each layer computes and keeps its weights next to the attention.
    """
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        watched = [_watch(name, m, found, stack) for name, m in model.named_modules()]
        if not any(watched):
            rule = f"of type {type(model).__name__} must have a module with `attend` or `attention_weights`"
            raise invalid("model", "missing", ..., rule, "see forge_core.interp")
        yield found


def _watch(name: str, module: Any, found: dict[str, Tensor], stack: ExitStack) -> bool:
    """Write the weights of `module` to `found` in each call, until the stack is closed; whether it has attention."""
    if hasattr(module, "attention_weights"):

        def hook(module: Any, inputs: Any, kwargs: Any, _: Any) -> None:
            with torch.no_grad():
                found[name] = module.attention_weights(*inputs, **kwargs)

        stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        return True

    attend = getattr(module, "attend", None)
    if attend is None:
        return False
    if not hasattr(attend, "weights"):
        rule = f"of type {type(attend).__name__} must have a method `weights`"
        fix = "use one process without context parallelism"
        raise invalid(f"{name}.attend", "unsupported", ..., rule, fix)

    def attend_and_keep(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        with torch.no_grad():
            found[name] = attend.weights(q, k, *rest)
        out: Tensor = attend(q, k, v, *rest)
        return out

    module.attend = attend_and_keep
    stack.callback(setattr, module, "attend", attend)
    return True


def draw_attention(
    weights: Tensor,
    path: str | Path,
    *,
    labels: Sequence[str] = (),
    key_labels: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    title: str = "",
) -> None:
    """Write a plot of attention weights (H, S, T) of one sequence: a square for each head, a line for each query.

        draw_attention(store["layers.3.attn_weights"][0], "layer3.png", labels=texts, title="layer 3")

    `labels` are the texts of the S tokens, written if they are at most 64; `key_labels` those of the T keys, by default
    the same. `heads` selects some. All heads have one scale of colors, from 0 to their largest weight; weights of 0, as
    those of later tokens, are grey. The suffix is .png, .svg or .pdf. Needs matplotlib (`forge-train-core[plot]`).

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

    # the size of a square follows its labels; the rest is space for labels outside, the title and the scale
    named = bool(labels) and max(shown.shape[1:]) <= _LABELED
    wide, high = (max(2.0, _INCHES * size) if named else 2.6 for size in shown.shape[:0:-1])
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

        for axis, words, rotation in ((square.yaxis, texts[0], 0), (square.xaxis, texts[1], 90)):
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
    """ValueError for what `draw_attention` cannot plot."""
    if weights.dim() != 3 or not weights.numel():
        rule = "must be (heads, queries, keys) of one sequence"
        raise invalid("weights", "shape", tuple(weights.shape), rule, "take one: weights[0]")
    for name, words, size in zip(("labels", "key_labels"), texts, weights.shape[1:], strict=True):
        if words and len(words) != size:
            rule = f"is the number of labels, and must be one for each of the {size} tokens"
            raise invalid(name, "length", len(words), rule)
    if path.suffix not in _FORMATS:
        fix = f"use {path.stem}.png"
        raise invalid("path", "suffix", str(path), "must end in .png, .svg or .pdf", fix)


def _visible(text: str) -> str:
    """The text of a token with visible white space."""
    return text.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "\u00b7")
