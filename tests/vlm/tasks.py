"""Questions about pictures that are drawn here, or come with scikit-learn; the answer is words.

A sample is pictures (N, 3, 32, 32) uint8, a prompt and an answer as token ids. Pictures without their content, or those of
another sample, leave the answer to chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SIDE = 32
COLORS = {
    "red": (230, 30, 30),
    "green": (30, 200, 30),
    "blue": (40, 60, 240),
    "yellow": (240, 230, 40),
    "cyan": (40, 220, 220),
    "magenta": (220, 40, 220),
    "white": (250, 250, 250),
    "orange": (250, 140, 20),
}
NAMES = list(COLORS)
NUMBERS = [str(i) for i in range(10)]
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
WORDS = [
    "<eos>",
    "<image>",
    "?",
    "color",
    "of",
    "what",
    "is",
    "how",
    "many",
    "digit",
    "first",
    "second",
    "goes",
]
VOCABULARY = {word: i for i, word in enumerate([*WORDS, *NAMES, *NUMBERS, *MOVES])}
EOS, IMAGE = VOCABULARY["<eos>"], VOCABULARY["<image>"]


class Sample(NamedTuple):
    """Pictures, the words of a question with <image> where a picture is, and the words of its answer."""

    images: np.ndarray  # (N, 3, 32, 32) uint8
    prompt: list[int]
    answer: list[int]


def ids(text: str) -> list[int]:
    """Token ids of words that are apart."""
    return [VOCABULARY[word] for word in text.split()]


def picture(squares: Sequence[tuple[str, int, int, int]]) -> np.ndarray:
    """Squares (color, row, column, side) on grey, with noise left to the callers."""
    canvas = np.full((SIDE, SIDE, 3), 20, np.uint8)
    for color, row, column, side in squares:
        canvas[row : row + side, column : column + side] = COLORS[color]
    return canvas.transpose(2, 0, 1)


def color_of_a_square(rng: np.random.Generator) -> Sample:
    """One square of eight colors at any place."""
    color = NAMES[rng.integers(8)]
    row, column = rng.integers(0, SIDE - 10, 2)
    image = picture([(color, row, column, 10)])
    return Sample(image[None], ids("<image> color ?"), ids(color))


def left_of_a_square(rng: np.random.Generator) -> Sample:
    """Three squares beside each other; the one that is left of a named one."""
    colors = [NAMES[i] for i in rng.permutation(8)[:3]]
    row, shift = rng.integers(0, SIDE - 8), rng.integers(0, 3)
    image = picture([(c, row, 10 * i + shift, 8) for i, c in enumerate(colors)])
    at = int(rng.integers(1, 3))
    return Sample(image[None], ids(f"<image> what is left of {colors[at]} ?"), ids(colors[at - 1]))


def number_of_squares(rng: np.random.Generator) -> Sample:
    """One to five squares of any colors, apart from each other."""
    number = int(rng.integers(1, 6))
    places = rng.permutation(9)[:number]
    squares = [(NAMES[rng.integers(8)], 11 * (p // 3) + 1, 11 * (p % 3) + 1, 7) for p in places]
    return Sample(picture(squares)[None], ids("<image> how many ?"), ids(str(number)))


def color_of_one_of_two(rng: np.random.Generator) -> Sample:
    """Two pictures, and a question about the first or the second."""
    colors = [NAMES[rng.integers(8)] for _ in range(2)]
    images = [picture([(c, *rng.integers(0, SIDE - 12, 2), 12)]) for c in colors]
    which = int(rng.integers(2))
    prompt = ids(f"<image> <image> color of {('first', 'second')[which]} ?")
    return Sample(np.stack(images), prompt, ids(colors[which]))


def direction_of_motion(rng: np.random.Generator) -> Sample:
    """Four frames of a square that moves; shuffled frames leave the direction to chance."""
    name = list(MOVES)[rng.integers(4)]
    step = np.array(MOVES[name]) * 6
    start = np.array([12, 12]) - step * 3 // 2 + rng.integers(-2, 3, 2)
    places = [start + step * i for i in range(4)]
    images = [picture([("white", *np.clip(p, 0, SIDE - 8), 8)]) for p in places]
    return Sample(np.stack(images), ids("<image> <image> <image> <image> what goes ?"), ids(name))


def digits(train: bool) -> list[Sample]:
    """The handwritten digits of scikit-learn: 1,437 to learn from, 360 held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[:1437] if train else order[1437:]
    grey = (data.images[chosen] * (255 / 16)).astype(np.uint8)
    large = grey.repeat(4, 1).repeat(4, 2)[:, None].repeat(3, 1)  # (N, 3, 32, 32)
    return [
        Sample(image[None], ids("<image> what digit ?"), ids(str(target)))
        for image, target in zip(large, data.target[chosen])
    ]


DRAWN: dict[str, Callable[[np.random.Generator], Sample]] = {
    "color": color_of_a_square,
    "left_of": left_of_a_square,
    "count": number_of_squares,
    "two_images": color_of_one_of_two,
    "motion": direction_of_motion,
}
#: Share of right answers of someone who sees nothing, and knows how often each answer is right.
CHANCE = {
    "color": 1 / 8,
    "left_of": 1 / 7,
    "count": 1 / 5,
    "two_images": 1 / 8,
    "motion": 1 / 4,
    "digits": 0.13,
}


class Rows(NamedTuple):
    """A batch: tokens, labels and document_ids (B, S), images (N, 3, 32, 32) of all rows in order."""

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor
    images: Tensor


def expanded(prompt: Sequence[int], tokens_per_image: int) -> list[int]:
    """A prompt with as many placeholders as a picture has tokens."""
    return [t for i in prompt for t in [i] * (tokens_per_image if i == IMAGE else 1)]


def batch_of(samples: Sequence[Sample], tokens_per_image: int) -> Rows:
    """Rows of the same length, padded on the right; labels are shifted, those of answers and their end alone."""
    rows = [(expanded(s.prompt, tokens_per_image), [*s.answer, EOS]) for s in samples]
    size = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    tokens = torch.zeros(len(rows), size, dtype=torch.int64)
    labels, documents = torch.full_like(tokens, -100), torch.full_like(tokens, -1)
    for i, (prompt, answer) in enumerate(rows):
        whole = torch.tensor(prompt + answer)
        tokens[i, : len(whole) - 1] = whole[:-1]
        documents[i, : len(whole) - 1] = 0
        labels[i, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    images = torch.from_numpy(np.concatenate([s.images for s in samples]))
    return Rows(tokens, labels, documents, images)
