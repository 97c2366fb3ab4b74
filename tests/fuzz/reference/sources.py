"""Sources of samples, as docs/data-order.md defines them.

The class of a source has `n`, the number of samples of an epoch (None: unknown), and `sample(i)`,
which returns sample i, of any epoch, as Rows with B = 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import packing
from .packing import derive, permutation
from .rows import Rows

Config = dict[str, Any]


class Packed:
    """A source of documents, packed into n samples that each epoch shuffles."""

    def __init__(
        self, config: Config, packs: Config, file: dict[str, np.ndarray], size: int, seed: int
    ) -> None:
        self.size, self.seed = size, seed
        self.documents, self.weights = documents_of(file)
        if self.weights is None:
            lengths = [len(document) for document in self.documents]
            name = packs["name"]
            if name == "concatenate":
                self.samples = packing.concatenate(lengths, size)
            else:
                self.samples = packing.fit(lengths, size, packs[name]["window"], name == "best_fit")
        else:
            self._shorten(config["chat"]["too_long"])
            lengths = [len(document) for document in self.documents]
            self.samples = packing.fit(lengths, size, 65536, best=True)
        self.n = len(self.samples)

    def _shorten(self, too_long: str) -> None:
        """Truncate conversations of more than S tokens, or leave them out."""
        kept = []
        for tokens, weights in zip(self.documents, self.weights, strict=True):
            if len(tokens) <= self.size:
                kept.append((tokens, weights))
            elif too_long == "truncate" and (weights[1 : self.size] > 0).any():
                kept.append((tokens[: self.size], weights[: self.size]))
            assert len(tokens) <= self.size or too_long != "refuse"
        self.documents = [tokens for tokens, _ in kept]
        self.weights = [weights for _, weights in kept]

    def sample(self, i: int) -> Rows:
        sample = self.samples[permutation(self.n, self.seed, i // self.n)[i % self.n]]
        return rows_of(packing.arrays(sample, self.documents, self.weights, self.size))


class Streamed:
    """A set that is read while training: shards of pieces of texts, shuffled in windows."""

    n = None

    def __init__(self, config: Config, file: dict[str, np.ndarray], size: int, seed: int) -> None:
        self.size, self.seed, self.window = size, seed, config["huggingface"]["shuffle_window"]
        documents, _ = documents_of(file)
        ends = np.cumsum(file["pieces"])
        self.pieces = [documents[end - count : end] for count, end in zip(file["pieces"], ends)]
        self.shards = min(config["huggingface"]["virtual_shards"], len(self.pieces))
        self.readers = [self._read(v) for v in range(self.shards)]
        self.found: list[list[Rows]] = [[] for _ in range(self.shards)]

    def _read(self, v: int) -> Iterator[Rows]:
        """Yield the samples of shard v, of one epoch after another."""
        pieces = permutation(len(self.pieces), derive(self.seed, "pieces"), 0)[v :: self.shards]
        for epoch in itertools.count():
            texts = []  # (m, d, tokens): text d of the m-th piece that the shard reads
            order = permutation(len(pieces), derive(self.seed, f"shard {v}"), epoch)
            for place, o in enumerate(order):
                m = epoch * len(pieces) + place
                texts += [(m, d, tokens) for d, tokens in enumerate(self.pieces[pieces[o]])]
            for first in range(0, len(texts), self.window):
                window = texts[first : first + self.window]
                m, d, _ = window[0]
                shuffled = permutation(len(window), derive(self.seed, f"window {v}"), m * 2**32 + d)
                documents = [window[place][2] for place in shuffled if len(window[place][2])]
                for sample in packing.concatenate([len(each) for each in documents], self.size):
                    yield rows_of(packing.arrays(sample, documents, None, self.size))

    def sample(self, i: int) -> Rows:
        number, v = divmod(i, self.shards)
        while len(self.found[v]) <= number:
            self.found[v].append(next(self.readers[v]))
        return self.found[v][number]


class Recorded:
    """A source with images: samples as the stream returned them."""

    def __init__(self, file: dict[str, np.ndarray]) -> None:
        self.file = file
        self.n = int(file["epoch"]) if "epoch" in file else None

    def sample(self, i: int) -> Rows:
        from .fusion import image_rows

        return image_rows(self.file, [i])


Source = Packed | Streamed | Recorded


def documents_of(file: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Return the tokens of each document, and their weights as labels if the file has them."""
    inner = file["offsets"][1:-1]
    weights = file.get("label_weights")
    return np.split(file["tokens"], inner), None if weights is None else np.split(weights, inner)


def rows_of(sample: dict[str, np.ndarray]) -> Rows:
    """Return arrays (S,) of a sample as Rows with B = 1; `ids` and `source` are -1."""
    none = torch.tensor([-1])
    return Rows(
        **{name: torch.from_numpy(array)[None] for name, array in sample.items()},
        ids=none,
        source=none,
    )


def join(samples: list[Rows], dtype: torch.dtype) -> Rows:
    """Concatenate samples to a micro-batch.

    Samples without images have empty tensors in lists of `extras`, and -1 in its arrays of ids.
    Where samples have positions of three axes, those of padding samples are expanded to three.
    """
    fields = ("tokens", "labels", "documents", "weights", "ids", "source")
    found: dict[str, Any] = {
        name: torch.cat([getattr(each, name) for each in samples]) for name in fields
    }
    found["weights"] = found["weights"].to(dtype)

    positions = [each.positions for each in samples]
    if any(each.dim() == 3 for each in positions):
        positions = [x if x.dim() == 3 else x[:, None].expand(-1, 3, -1) for x in positions]

    extras: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in samples for name in each.extras):
        one = next(each.extras[name] for each in samples if name in each.extras)
        if isinstance(one, Tensor):
            none = torch.full_like(one, -1)
            extras[name] = torch.cat([each.extras.get(name, none) for each in samples])
        else:
            extras[name] = [x for each in samples for x in each.extras.get(name, [one[0][:0]])]
    return Rows(**found, positions=torch.cat(positions), extras=extras)
