"""From documents to samples: permutations, packings and arrays, as docs/data-order.md defines them.

S is the number of tokens of a sample (`size` in the code). A document is a numpy array of tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

NO_LABEL = -100


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop` - 1 of a document."""

    document: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


Sample = list[Piece]  # in the order of their tokens


# Seeds and permutation


def derive(seed: int, name: str) -> int:
    """Return the seed of a part of the data."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@lru_cache(maxsize=256)
def permutation(n: int, seed: int, epoch: int) -> list[int]:
    """Return 0 to n - 1 in the order of an epoch: a Feistel network of 12 rounds over 2k bits."""
    k = max(1, ((n - 1).bit_length() + 1) // 2)
    stream = hashlib.shake_256(f"forge order 1:{seed}:{epoch}".encode()).digest(96)
    keys = [int.from_bytes(stream[i : i + 8], "little") for i in range(0, 96, 8)]

    def network(x: int) -> int:
        left, right = x >> k, x & (2**k - 1)
        for key in keys:
            z = (right + key) % 2**64
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            z = z ^ (z >> 31)
            left, right = right, left ^ (z >> (64 - k))
        return (left << k) | right

    order = []
    for place in range(n):
        x = network(place)
        while x >= n:
            x = network(x)
        order.append(x)
    return order


# Packings: lists of samples, of documents with these lengths


def concatenate(lengths: Sequence[int], size: int) -> list[Sample]:
    """Split the concatenated documents into samples of S tokens, the last one shorter."""
    samples: list[Sample] = []
    room = 0
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0:
                samples.append([])
                room = size
            stop = min(length, start + room)
            samples[-1].append(Piece(document, start, stop))
            room -= stop - start
            start = stop
    return samples


def fit(lengths: Sequence[int], size: int, window: int, best: bool) -> list[Sample]:
    """Place documents that are not longer than S in one sample each: first fit, or best fit."""
    samples = []
    for first in range(0, len(lengths), window):
        full, rest = [], []
        for document in range(first, min(first + window, len(lengths))):
            cut = lengths[document] // size * size
            full += [[Piece(document, start, start + size)] for start in range(0, cut, size)]
            if cut < lengths[document]:
                rest.append(Piece(document, cut, lengths[document]))
        opened = best_fit(rest, size) if best else first_fit(rest, size)
        samples += full + [sorted(each, key=lambda piece: piece.document) for each in opened]
    return samples


def first_fit(pieces: list[Piece], size: int) -> list[Sample]:
    """Place each piece in the first sample with enough room, else in a new one."""
    opened: list[Sample] = []
    room: list[int] = []
    for piece in pieces:
        number = next((i for i, left in enumerate(room) if left >= piece.length), len(opened))
        if number == len(opened):
            opened.append([])
            room.append(size)
        opened[number].append(piece)
        room[number] -= piece.length
    return opened


def best_fit(pieces: list[Piece], size: int) -> list[Sample]:
    """Place each piece, the longest first, in the sample with the least room that is enough.

    Among samples with the same room it is the one whose last piece was placed earliest.
    """
    opened: list[Sample] = []
    room: list[int] = []
    placed: list[int] = []
    for turn, piece in enumerate(sorted(pieces, key=lambda piece: -piece.length)):
        enough = [i for i, left in enumerate(room) if left >= piece.length]
        if enough:
            number = min(enough, key=lambda i: (room[i], placed[i]))
        else:
            number = len(opened)
            opened.append([])
            room.append(size)
            placed.append(turn)
        opened[number].append(piece)
        room[number] -= piece.length
        placed[number] = turn
    return opened


def arrays(
    sample: Sample,
    documents: Sequence[np.ndarray],
    label_weights: Sequence[np.ndarray] | None,
    size: int,
) -> dict[str, np.ndarray]:
    """Return tokens, labels, positions, documents and weights of a sample, (S,) each.

    `label_weights` has an array for each document: the weight of each of its tokens as a label.
    Without it all tokens have 1. A sample without pieces is a padding sample.
    """
    found = {
        "tokens": np.zeros(size, np.int64),
        "labels": np.full(size, NO_LABEL, np.int64),
        "positions": np.zeros(size, np.int64),
        "documents": np.full(size, -1, np.int64),
        "weights": np.zeros(size, np.float64),
    }
    place = 0
    for number, piece in enumerate(sample):
        document = documents[piece.document]
        for t in range(piece.start, piece.stop):
            found["tokens"][place] = document[t]
            found["positions"][place] = t - piece.start
            found["documents"][place] = number
            if t + 1 < len(document):
                weight = (
                    1.0 if label_weights is None else float(label_weights[piece.document][t + 1])
                )
                if weight > 0:
                    found["labels"][place] = document[t + 1]
                    found["weights"][place] = weight
            place += 1
    return found
