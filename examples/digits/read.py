"""Ask trained readers which digit they see, and draw what they look at.

    python -m examples.digits.read runs/digits runs/digits_moma --write docs/vision

Prints a JSON line for each run: the share of the 360 held-out digits that it reads right by `generate`, and the same of
blank pictures. --write keeps the lines in a JSON file, and draws where each reader looked while it answered.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forge_core import SamplingConfig, generate, parameter_count
from forge_core.interp import attention_weights
from forge_train import load_job, load_trained
from forge_vlm.data import VisionChatSource


class HeldOut(NamedTuple):
    """Questions (N, S) with answers (N,), the answers' end, and pictures (N, 3, H, W)."""

    questions: Tensor
    answers: Tensor
    end: int
    images: Tensor


class Reading(NamedTuple):
    """A row of the table, and how much the reader looked at each patch of each picture (N, side, side)."""

    row: dict[str, Any]
    looked: Tensor


def held_out(run: Path) -> HeldOut:
    """The held-out digits as the run's own source writes them."""
    (source,) = load_job(run / "config.toml").config.data.sources.values()
    talks = VisionChatSource(Path(source.path).with_name("held_out.jsonl"), **source.options)
    samples = [talks.sample(i) for i in range(len(talks.lengths))]
    rows = torch.stack([torch.from_numpy(s.tokens) for s in samples])
    behind = torch.from_numpy(samples[0].labels) != -100  # the prompt's last token is the first
    cut = int(behind.nonzero()[0]) + 1
    images = torch.cat([talks.media(s)[0][0]["images"] for s in samples])
    return HeldOut(rows[:, :cut], rows[:, cut], int(rows[0, cut + 1]), images)


def read(run: Path) -> Reading:
    """Answers of the model of a run, without its pictures too, and its attention from the last token of the question."""
    model, _, step = load_trained(run)
    asked = held_out(run)
    answers, ended = answer(model, asked)
    blank, _ = answer(model, asked._replace(images=torch.zeros_like(asked.images)))
    row = {
        "fusion": model.config.fusion.name,
        "right": share(answers == asked.answers),
        "right_blank": share(blank == asked.answers),
        "ended": share(ended),
        "parameters": parameter_count(model),
        "tokens": asked.questions.size(1),
        "steps": step,
    }
    return Reading(row, look(model, asked))


def answer(model: Any, asked: HeldOut) -> tuple[Tensor, Tensor]:
    """The first token after each question (N,), and whether the end is the second."""
    greedy = SamplingConfig(temperature=0.0)
    new = generate(model, asked.questions, 2, greedy, extras={"images": asked.images})
    return new[:, 0], new[:, 1] == asked.end


@torch.no_grad()
def look(model: Any, asked: HeldOut) -> Tensor:
    """(N, side, side): attention of the token that predicts the answer over a picture, a mean over heads of the last layer
    that sees pictures."""
    with attention_weights(model) as weights:
        model(asked.questions, images=asked.images)
    if model.config.fusion.name == "cross_attention":
        *_, last = (each for name, each in weights.items() if ".cross_" in name)  # (N, H, S, T)
        patches = last[:, :, -1].mean(1)
    else:
        *_, last = weights.values()  # (N, H, S, S)
        here = asked.questions[0] == model.config.modalities["image"].first_id
        patches = last[:, :, -1].mean(1)[:, here]
    side = model.config.vision.vit.side
    return patches.unflatten(1, (side, side))


def share(of: Tensor) -> float:
    return round(of.double().mean().item(), 4)


def draw(readings: Sequence[Reading], asked: HeldOut, path: Path) -> None:
    """A picture of each class and where each reader looked at it; below, means over all held-out pictures of a class."""
    import matplotlib
    from matplotlib.figure import Figure

    classes = [asked.answers == answer for answer in asked.answers.unique()]
    grey = asked.images.float().mean(1) / 255  # (N, H, W)
    blocks = {
        "a held-out\ndigit": [int(of.nonzero()[0]) for of in classes],
        "mean of the\nheld-out": classes,
    }
    height = 1 + len(readings)
    figure = Figure(figsize=(10, 2 * height + 0.3), layout="constrained")
    for part, (title, chosen) in zip(figure.subfigures(2, 1), blocks.items()):
        axes = part.subplots(height, len(classes), squeeze=False)
        for row, reading in zip(axes, [None, *readings]):
            name = title if reading is None else reading.row["fusion"]
            row[0].set_ylabel(_lines(name), rotation=0, ha="right", va="center", fontsize=9)
            for axis, which in zip(row, chosen):
                looked = None if reading is None else _mean(reading.looked, which)
                _show(axis, _mean(grey, which), looked)
    with matplotlib.rc_context({"savefig.dpi": 90}):
        figure.savefig(path, metadata={"Software": None})


def _lines(words: str) -> str:
    return words.replace("_of_", "\nof ").replace("_", "\n")


def _mean(maps: Tensor, which: int | Tensor) -> Tensor:
    """One of maps (N, h, w), or the mean of some."""
    return maps[which] if isinstance(which, int) else maps[which].mean(0)


def _show(axis: Any, picture: Tensor, looked: Tensor | None) -> None:
    """A grey picture (H, W), and over it how much of a look each patch (side, side) had, from none to the most in red."""
    size = picture.size(0)
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set(color="0.85", linewidth=0.6)
    extent = (0, size, size, 0)
    ink = 1.0 if looked is None else 0.4  # faint below the red
    axis.imshow(1 - ink * picture, cmap="gray", vmin=0, vmax=1, extent=extent)
    if looked is not None:
        strength = ((looked - looked.min()) / (looked.max() - looked.min())).numpy()
        red = np.ones_like(strength)
        axis.imshow(red, cmap="Reds", alpha=0.9 * strength, vmin=0, vmax=1.2, extent=extent)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| fusion | right | blank pictures | ended | parameters | tokens of a question | steps of 64 |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        shares = " | ".join(f"{r[k]:.1%}" for k in ("right", "right_blank", "ended"))
        counts = f"{r['parameters'] / 1e6:.2f} M | {r['tokens']} | {r['steps']}"
        lines.append(f"| {r['fusion']} | {shares} | {counts} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument(
        "--write", type=Path, help="page without .md: its table, .png, and data/*.json"
    )
    arguments = parser.parse_args()
    readings = []
    for run in arguments.runs:
        readings.append(read(run))
        print(json.dumps(readings[-1].row), flush=True)
    if arguments.write is None:
        return
    rows = [reading.row for reading in readings]
    data = arguments.write.parent / "data"
    data.mkdir(exist_ok=True)
    (data / f"{arguments.write.name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(readings, held_out(arguments.runs[0]), arguments.write.with_suffix(".png"))
    page = arguments.write.with_suffix(".md")
    before, _, behind = page.read_text().partition("| fusion |")
    behind = behind[behind.index("\n\n") :]
    page.write_text(before + table(rows) + behind)


if __name__ == "__main__":
    main()
