"""Which tokens of a sample are images, their positions, and which tokens see each other.

Sources: Wang et al. 2024 (Qwen2-VL: positions of time, row and column), Bai et al. 2025 (Qwen3-VL: their interleaved pairs,
in `rotary.py`). B samples of S tokens; a document is a run of equal ids.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Config, segments, visible
from .rows import Rows

NO_LABEL = -100
RAGGED = ("images", "patches", "grids")  # of Rows.extras: lists with a tensor for each sample
SPAN_IDS = {
    "image": "image_ids",
    "clip": "clip_ids",
    "document": "media_ids",
    "prefix_lm": "prefix_ids",
}


def modalities(config: Config, tokens: Tensor) -> Tensor:
    """Return the modality of each token (B, S): 0 is text, k the k-th of `modalities` by name."""
    found = torch.zeros_like(tokens)
    for number, name in enumerate(sorted(config["modalities"]), start=1):
        modality = config["modalities"][name]
        first, count = modality["first_id"], modality["num_ids"]
        found[(tokens >= first) & (tokens < first + count)] = number
    return found


def predicted_modalities(config: Config, labels: Tensor) -> dict[str, Tensor]:
    """Return the labels (B, S) bool of each modality that is predicted; {} where only text is."""
    discrete = [name for name, modality in config["modalities"].items() if modality["discrete"]]
    if not discrete:
        return {}
    numbers, names = modalities(config, labels), ["text", *sorted(config["modalities"])]
    return {name: numbers == names.index(name) for name in ("text", *discrete)}


def placeholders(config: Config, rows: Rows) -> Tensor:
    """Return (B, S) bool: tokens that features of images replace."""
    found = torch.zeros_like(rows.tokens, dtype=torch.bool)
    for modality in config["modalities"].values():
        if not modality["discrete"]:
            found |= rows.tokens == modality["first_id"]
    return found & (rows.documents >= 0)


def groups_of(config: Config, tokens: Tensor, share: dict[str, str]) -> dict[str, Tensor]:
    """Return for each group of weights, by the name of its modality, the tokens (B, S) bool that use it."""
    numbers = modalities(config, tokens)
    groups: dict[str, Tensor] = {}
    for number, name in enumerate(["text", *sorted(config["modalities"])]):
        group = share.get(name, name)
        groups[group] = groups.get(group, torch.zeros_like(numbers, dtype=torch.bool)) | (
            numbers == number
        )
    return groups


@dataclass
class Images:
    """The images of one sample, in order."""

    tokens: list[Tensor]  # (T, D) of each
    places: list[list[int]]  # the positions in the sample of their placeholders


def document_starts(documents: Tensor) -> list[int]:
    """Return the first position of each document of a sample (S,), and S."""
    changes = [i for i in range(1, len(documents)) if documents[i] != documents[i - 1]]
    return [0, *changes, len(documents)]


def image_grid(config: Config, rows: Rows, b: int, number: int, count: int) -> tuple[int, int]:
    """Return rows and columns of the tokens of an image: of its grid, or the square of `count`."""
    if "grids" in rows.extras:
        merge = config["vision"]["vit"]["merge"]
        _, height, width = rows.extras["grids"][b][number].tolist()
        return height // merge, width // merge
    side = math.isqrt(count)
    return side, side


def positions_of(config: Config, rows: Rows, images: list[Images]) -> Tensor:
    """Return the positions of `config["positions"]`: (B, S), or (B, 3, S) of time, row and column.

    Positions begin at 0 in each document. sequential: they count tokens. text_preserving: all tokens of an image have the
    position of the next text token, and the text goes on at the next one. mrope: a text token has three equal positions;
    an image that begins at p has (p, p + row, p + column), and the text goes on after the largest. Each branch goes on
    from the tokens that the branches of its document share.
    """
    rule, branches = config["positions"], rows.extras.get("branch_ids")
    found = torch.zeros(rows.tokens.size(0), 3, rows.tokens.size(1), dtype=torch.int64)
    for b, of_row in enumerate(images):
        first_places = {places[0]: number for number, places in enumerate(of_row.places)}
        starts = document_starts(rows.documents[b])
        for start, stop in itertools.pairwise(starts):
            position, i, shared = 0, start, 0
            while i < stop:
                if (
                    branches is not None
                    and branches[b, i] > 0
                    and branches[b, i] != branches[b, i - 1]
                ):
                    shared = position if branches[b, i - 1] == 0 else shared
                    position = shared
                if i not in first_places or rule == "sequential":
                    found[b, :, i] = position
                    position, i = position + 1, i + 1
                    continue

                places = of_row.places[first_places[i]]
                height, width = image_grid(config, rows, b, first_places[i], len(places))
                for number, place in enumerate(places):
                    found[b, :, place] = position
                    if rule == "mrope":
                        found[b, 1, place] += number // width
                        found[b, 2, place] += number % width
                position += max(height, width) if rule == "mrope" else 1
                i += len(places)
    return found if rule == "mrope" else found[:, 0]


def spans_of(config: Config, rows: Rows, images: list[Images]) -> Tensor | None:
    """Return (B, S) numbers of tokens that see each other both ways, -1 for none; None if all are causal."""
    scope = config["bidirectional"]
    if scope == "none":
        return None
    spans = torch.full_like(rows.tokens, -1)
    if scope == "clip":  # only the stream says which images are of a clip
        return rows.extras.get("clip_ids", spans)

    numbers = segments(rows.documents)
    for b, of_row in enumerate(images):
        if scope == "prefix_lm":
            starts = document_starts(rows.documents[b])
            for number, (start, stop) in enumerate(itertools.pairwise(starts)):
                labeled = [i for i in range(start, stop) if rows.labels[b, i] != NO_LABEL]
                if labeled:  # the token that predicts the first token of the answer is the last one of the prefix
                    spans[b, start : labeled[0] + 1] = number
            continue
        for number, places in enumerate(of_row.places):
            spans[b, places] = number if scope == "image" else numbers[b, places[0]]
    return spans


def check_stream(config: Config, rows: Rows, images: list[Images]) -> None:
    """Compare positions and spans with those that the stream gave: AssertionError if they differ.

    Samples without images are of any source of tokens, which may have no rules for images: they are left out.
    """
    if not any(name in rows.extras for name in RAGGED):
        return
    here = rows.documents >= 0
    expected, given = positions_of(config, rows, images), rows.positions
    where = here if given.dim() == 2 else here[:, None].expand_as(given)
    assert torch.equal(given[where], expected[where]), "positions of the stream differ"

    spans = spans_of(config, rows, images)
    name = SPAN_IDS.get(config["bidirectional"])
    if spans is None or name not in rows.extras:
        return
    numbers = segments(rows.documents)
    for b in range(len(spans)):
        for ids in (spans[b], rows.extras[name][b]):
            assert not (ids[~here[b]] >= 0).any(), "padding is in a span"
        mine, theirs = together(spans, numbers)[b], together(rows.extras[name], numbers)[b]
        assert torch.equal(mine, theirs), "spans of the stream differ"


def together(spans: Tensor, numbers: Tensor) -> Tensor:
    """Return (B, S, S) bool: tokens of one span of one document."""
    same = (spans[:, :, None] == spans[:, None, :]) & (spans >= 0)[:, :, None]
    return same & (numbers[:, :, None] == numbers[:, None, :])


Mask = Callable[[Tensor, int | None], Tensor]


def mask_of(config: Config, rows: Rows, images: list[Images]) -> Mask:
    """Return the function that replaces `visible`: causal, both ways in spans, and apart in branches."""
    spans, branches = spans_of(config, rows, images), rows.extras.get("branch_ids")

    def mask(documents: Tensor, window: int | None = None) -> Tensor:
        allowed = visible(documents)
        if spans is not None:
            allowed = allowed | together(spans, segments(documents))
        if window is not None:  # of the tokens before it
            places = torch.arange(documents.size(1))
            allowed = allowed & (places[:, None] - places[None, :] < window)
        if branches is not None:  # shared tokens (0) and tokens of the same branch
            keys, queries = branches[:, None, :], branches[:, :, None]
            allowed = allowed & ((keys <= 0) | (keys == queries))
        return allowed

    return mask
