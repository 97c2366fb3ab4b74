"""Images that are drawn, not read: a square of one of eight colors, its name the answer.

S tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forge_vlm._shared.problems import invalid
from forge_vlm.data.packing import RaggedMedia
from forge_vlm.sequence.plan import IGNORE, PAD

__all__ = ["DrawnSquares"]

#: Words, and their ids: the end of a sequence, a placeholder, the question, then colors.
WORDS = ("<eos>", "<image>", "colour?", "red", "green", "blue", "yellow", "cyan", "magenta", "white", "orange")  # fmt: skip # language: words of the data
_COLORS = ((230, 30, 30), (30, 200, 30), (40, 60, 240), (240, 230, 40),
            (40, 220, 220), (220, 40, 220), (250, 250, 250), (250, 140, 20))  # fmt: skip
_EPOCH = 100_000


class DrawnSquares:
    """Rows `<image> ...`, the question, its name, `<eos>`, of which the name and the end are trained.

        [data.sources.squares]
        name = "forge_vlm.data.drawn:DrawnSquares"

    size: height and width of an image in pixels; tokens: placeholders of one, as many as the adapter gives. Row i is a
    function of the seed and i, and rows of validation are others. For trying a model out: no file is read.
    """

    vocab_size: int | None = len(WORDS)
    max_token_id = len(WORDS) - 1
    tokenizer: dict[str, Any] | None = None

    def __init__(self, config: Any, size: int = 32, tokens: int = 16) -> None:
        if size < 4:
            raise invalid("size", "range", size, "must be at least 4", "use 32")
        if tokens < 1:
            raise invalid("tokens", "range", tokens, "must be at least 1", "use 16")
        self.split, self.size, self.tokens = config.split, size, tokens

    def fingerprint(self) -> dict[str, str | int]:
        """What determines the samples; a resumed run compares it."""
        return {"kind": "drawn-1", "split": self.split, "size": self.size, "tokens": self.tokens}

    def stream(self, seq_len: int, seed: int) -> DrawnSequences:
        """Samples of `seq_len` tokens; ValueError if one does not fit."""
        if seq_len < self.tokens + 2:
            rule = f"must hold a picture of {self.tokens} tokens, a question and its answer"
            raise invalid("seq_len", "range", seq_len, rule, f"use {self.tokens + 2}")
        return DrawnSequences(self, seq_len, seed)


class DrawnSequences:
    """The rows of `DrawnSquares`."""

    def __init__(self, source: DrawnSquares, seq_len: int, seed: int) -> None:
        self.source, self.seq_len, self.seed = source, seq_len, seed

    def __len__(self) -> int:
        return _EPOCH

    def fingerprint(self) -> dict[str, str | int]:
        return {**self.source.fingerprint(), "seq_len": self.seq_len, "seed": self.seed}

    def arrays(self, ids: np.ndarray) -> dict[str, Any]:
        """Rows by sample index, with one image each."""
        rows, of, size = len(ids), self.source.tokens, self.source.size
        tokens, labels = (np.full((rows, self.seq_len), v, np.int64) for v in (0, IGNORE))
        documents = np.full((rows, self.seq_len), PAD, np.int64)
        pictures = np.full((rows, 3, size, size), 20, np.uint8)
        tokens[:, :of], tokens[:, of], documents[:, : of + 2] = 1, 2, 0
        for row, i in enumerate(ids):
            random = np.random.default_rng([self.seed, self.source.split == "validation", int(i)])
            color, side = int(random.integers(len(_COLORS))), size // 2
            y, x = random.integers(0, size - side + 1, 2)
            pictures[row, :, y : y + side, x : x + side] = np.array(_COLORS[color])[:, None, None]
            tokens[row, of + 1] = labels[row, of] = 3 + color
            labels[row, of + 1] = 0

        places = np.where(documents == 0, np.arange(self.seq_len), 0)
        images = RaggedMedia(torch.from_numpy(pictures), torch.arange(rows + 1))
        names = {"tokens": tokens, "labels": labels, "positions": places}
        return {**names, "document_ids": documents, "images": images}
