"""Colored squares and the word of their color: a source of rows with images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from forge_data import Ragged
from forge_vlm.vision import Features

SIDE, PATCHES = 8, 4
#: Ids: 0 ends a row, 1 asks, 2 is the placeholder, 3 to 6 are colors.
END, ASK, IMAGE, FIRST_COLOR = 0, 1, 2, 3
_COLORS = np.array([(230, 30, 30), (30, 200, 30), (40, 60, 240), (240, 230, 40)], np.uint8)


class Squares:
    """Rows `<image> x 4, ask, color, end`, of which only answers are trained.

    text: of each `group` rows, so many at the end have no image. seen: images show their square. axes: of the positions. places: placeholder tokens of each image.
    """

    vocab_size, max_token_id = 16, 15
    tokenizer: dict[str, Any] | None = None

    def __init__(
        self,
        config: Any,
        group: int = 1,
        text: int = 0,
        seen: bool = True,
        axes: int = 1,
        places: int = PATCHES,
    ) -> None:
        self.first = 0 if config.split == "train" else 10**6
        self.group, self.text, self.seen = group, text, seen
        self.axes, self.places = axes, places

    def fingerprint(self) -> dict[str, str | int]:
        return {"first": self.first, "rows": f"{self.text} of {self.group}", "seen": int(self.seen)}

    def stream(self, seq_len: int, seed: int) -> SquareRows:
        return SquareRows(self, seq_len, seed)


class SquareRows:
    """The rows of `Squares`: sample i is drawn from (seed, i)."""

    def __init__(self, source: Squares, seq_len: int, seed: int) -> None:
        self.source, self.seq_len, self.seed = source, seq_len, seed

    def __len__(self) -> int:
        return 1000

    def fingerprint(self) -> dict[str, str | int]:
        return {**self.source.fingerprint(), "seq_len": self.seq_len, "seed": self.seed}

    def arrays(self, ids: np.ndarray) -> dict[str, Any]:
        rows = [self._row(int(i)) for i in [*ids, 0]]
        names = ("tokens", "labels", "positions", "document_ids")
        found: dict[str, Any] = {n: np.stack([row[n] for row in rows])[:-1] for n in names}
        images = [row["images"] for row in rows[:-1]]
        offsets = np.cumsum([0, *map(len, images)])
        values = np.concatenate([rows[-1]["images"][:0], *images])
        return {**found, "images": Ragged(torch.from_numpy(values), torch.from_numpy(offsets))}

    def _row(self, i: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([self.seed, self.source.first + i])
        color = int(random.integers(len(_COLORS)))
        shown = i % self.source.group < self.source.group - self.source.text
        question = [*[IMAGE] * self.source.places * shown, ASK]
        line = np.array([*question, FIRST_COLOR + color, END], np.int64)
        tokens = np.full(self.seq_len, END)
        labels = np.full(self.seq_len, -100)
        documents = np.full(self.seq_len, -1)
        size = len(line) - 1
        tokens[:size], documents[:size] = line[:-1], 0
        places = np.where(documents == 0, np.arange(self.seq_len), 0)

        labels[len(question) - 1 : size] = line[len(question) :]
        return {
            "tokens": tokens,
            "labels": labels,
            "positions": places
            if self.source.axes == 1
            else np.stack([places, 2 * places, 3 * places]),
            "document_ids": documents,
            "images": self._image(random, color)[None][:shown],
        }

    def _image(self, random: np.random.Generator, color: int) -> np.ndarray:
        canvas = np.full((SIDE, SIDE, 3), 20, np.uint8)
        row, column = random.integers(0, SIDE - 4, 2)
        if self.source.seen:
            canvas[row : row + 4, column : column + 4] = _COLORS[color]
        return np.ascontiguousarray(canvas.transpose(2, 0, 1))


class FlatEncoder(nn.Module):
    """An encoder with code of its own: one linear layer on each quarter of an image."""

    extra_inputs = ("images",)

    def __init__(self, config: Any, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Linear(3 * SIDE * SIDE // PATCHES, width)

    def forward(self, images: Any) -> Features:
        return Features(
            self.patches(images.values.float().reshape(len(images.values), PATCHES, -1)), 2, 2
        )

    def dummy(self, device: Any) -> dict[str, Any]:
        return {
            "images": Ragged(torch.zeros(1, 3, SIDE, SIDE, device=device), torch.tensor([0, 1]))
        }


class ScaledAdapter(nn.Module):
    """An adapter with code of its own: a linear layer times a factor."""

    def __init__(self, config: Any, width: int, dim: int, factor: float = 1.0) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(width, dim), factor

    def forward(self, features: Features) -> torch.Tensor:
        scaled: torch.Tensor = self.linear(features.tokens) * self.factor
        return scaled
