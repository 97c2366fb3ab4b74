"""One description of a mixed sequence: segments of text and of media. Masks and positions are functions of it.

Shapes: B sequences, S tokens of a sequence. All tensors are on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from forge_vlm._renamed import renamed_keyword
from forge_vlm._shared.problems import invalid

__all__ = ["IGNORE", "PAD", "POSITIONS", "SCOPES", "SPAN_INPUTS", "TEXT", "Segment", "SequencePlan"]

IGNORE = -100  # label of a position with nothing to learn
PAD = -1  # document id and modality id of padding
TEXT = 0
SCOPES = ("image", "clip", "document", "prefix_lm")
#: The keyword of ids by which tokens of a scope see each other.
SPAN_INPUTS = {s: f"{w}_ids" for s, w in zip(SCOPES, ("image", "clip", "media", "prefix"))}
POSITIONS = ("sequential", "text_preserving", "mrope")


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + length) of a sequence, of one document and one modality.

    modality 0 is text, -1 padding, others the numbers of a config's modalities by name. `image` is the number of
    the image (or clip) in the row whose tokens these are, -1 for text; `grid` its tokens by time, row and column.
    `branch` 0 is what all of a document share; tokens of another branch see those of branch 0 and their own. `clip` is the
    number of what the image is a part of, the video of a frame or the image of a tile, -1 where it is of none.
    """

    modality: int
    start: int
    length: int
    document_id: int = 0
    image: int = -1
    grid: tuple[int, int, int] | None = None
    branch: int = 0
    clip: int = -1

    @property
    def stop(self) -> int:
        """The first token after."""
        return self.start + self.length


@dataclass(frozen=True)
class SequencePlan:
    """Rows of segments, in order and without gaps, `size` tokens each.

    plan = SequencePlan.of(tokens, document_ids, {126: 1}, grids=[[(1, 2, 3)], []])
    batch_positions = plan.positions("mrope")                       # (B, 3, S)
    """

    rows: tuple[tuple[Segment, ...], ...]
    size: int

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            borders = [0, *(segment.stop for segment in row)]
            if [s.start for s in row] != borders[:-1] or borders[-1] != self.size:
                ends = [(s.start, s.stop) for s in row]
                rule = f"(first and one after the last token) must cover the {self.size} tokens of the row in order"
                fix = "correct them"
                raise invalid("segments", "order", ends, rule, fix, where=f"row {number}")

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        document_ids: Tensor | None,
        modalities: Mapping[int, int],
        grids: Sequence[Sequence[tuple[int, int, int]]] | None = None,
        branch_ids: Tensor | None = None,
        clips: Sequence[Sequence[int]] | None = None,
    ) -> SequencePlan:
        """The plan of tokens (B, S) that hold placeholders, {token id: modality}.

        `grids` has for each sequence the (time, rows, columns) in tokens of each of its images, in order: adjacent images
        are told apart by their sizes. Without it each run of one placeholder is an image. branch_ids (B, S) are 0 where
        branches share; `clips` has for each sequence the clip of each image. Raises ValueError where placeholders are not
        those of the grids.
        """
        rows = []
        for number, row in enumerate(tokens.tolist()):
            documents = [0] * len(row) if document_ids is None else document_ids[number].tolist()
            branches = [0] * len(row) if branch_ids is None else branch_ids[number].tolist()
            sizes = None if grids is None else list(grids[number])
            kinds = [PAD if d < 0 else modalities.get(t, TEXT) for t, d in zip(row, documents)]
            owners = [] if clips is None else list(clips[number])
            runs = zip(kinds, documents, branches)
            rows.append(tuple(_segments(groupby(runs), sizes, owners, number)))
        return cls(tuple(rows), tokens.size(1))

    def modality_ids(self) -> Tensor:
        """(B, S) int64: -1 padding, 0 text, others media."""
        return self._filled(lambda s: s.modality)

    def document_ids(self) -> Tensor:
        """(B, S) int64: -1 padding."""
        return self._filled(lambda s: s.document_id)

    def image_ids(self) -> Tensor:
        """(B, S) int64: number of the image in its sequence, -1 on text and padding."""
        return self._filled(lambda s: s.image)

    def branches(self) -> Tensor:
        """(B, S) int64: 0 for what all of a document share."""
        return self._filled(lambda s: s.branch)

    @renamed_keyword(learnt="trained")  # language: old name
    def labels(self, tokens: Tensor, trained: Collection[int] = (TEXT,)) -> Tensor:
        """The target *for* each position (B, S): the token after it; -100 where that is another document, another
        branch, a medium or padding. The last token of an image predicts the first of the text after it. `trained` are
        the modalities of targets: `modalities.trained_modalities` has those of discrete tokens too."""
        labels = torch.full_like(tokens, IGNORE)
        labels[:, :-1] = tokens[:, 1:]
        documents, branches, modalities = (
            self.document_ids(),
            self.branches(),
            self.modality_ids(),
        )
        same = documents[:, 1:] == documents[:, :-1]
        # the end of the trunk predicts the first token of the branch that follows it, and of no other
        same &= (branches[:, 1:] == branches[:, :-1]) | (branches[:, :-1] == 0)
        targets = torch.isin(modalities[:, 1:], torch.tensor(list(trained)))
        labels[:, :-1][~(same & targets)] = IGNORE
        labels[:, -1] = IGNORE
        return labels

    def positions(self, name: str = "sequential") -> Tensor:
        """Positions that begin at 0 in each document: (B, S), or (B, 3, S) for "mrope".

        "sequential": one for each token. "text_preserving": an image takes one, for all of its tokens. "mrope": the
        tokens of an image have those of their time, row and column after the text before, and text goes on after
        the largest of them (Qwen2-VL, section 2.1). Branches go on where what they share ends.
        """
        if name not in POSITIONS:
            rule = f"must be one of {', '.join(POSITIONS)}"
            raise invalid("positions", "unknown", name, rule, "use one")
        found = torch.zeros(len(self.rows), 3, self.size, dtype=torch.int64)
        for number, row in enumerate(self.rows):
            for segment, begin in _begins(row, name):
                found[number, :, segment.start : segment.stop] = _within(segment, name) + begin
        return found if name == "mrope" else found[:, 0]

    def spans(self, scope: str, labels: Tensor | None = None) -> Tensor:
        """Tokens that see each other also ahead, as one number each within a document, -1 for those that do not: (B, S)
        int64. Those of an "image", of a "clip", of all media of a "document"; by "prefix_lm" those before the first
        target of `labels` (B, S), or before the branches of a document.
        """
        if scope not in SCOPES:
            rule = f"must be one of {', '.join(SCOPES)}"
            raise invalid("scope", "unknown", scope, rule, "use one, or None")
        if scope == "image":
            return self.image_ids()

        if scope == "clip":
            return self._filled(lambda s: s.clip)
        if scope == "document":
            return self._filled(lambda s: 0 if s.modality > TEXT else -1)

        assert labels is not None
        documents, shared = self._documents(), self.branches() == 0
        inside = (documents >= 0) & shared
        found = torch.full_like(documents, -1)
        for row, ids in enumerate(documents):
            for document in ids.unique().tolist():
                here = inside[row] & (ids == document)
                behind = (labels[row] != IGNORE).long().mul(ids == document).cumsum(0)
                # the token that predicts the first target is the last of the prefix
                found[row, here & (behind.roll(1).index_fill(0, torch.tensor([0]), 0) == 0)] = 0

        return found

    def visible(self, scope: str | None = None, labels: Tensor | None = None) -> Tensor:
        """Which keys (dim 2) each query (dim 1) sees, (B, S, S) bool: those of its document, of its branch or of what
        branches share, at or before it; with `scope` also those after it of its `spans`. Padding sees itself only. A
        reference: it holds S * S booleans for each sequence.
        """
        documents, branches = self._documents(), self.branches()
        index = torch.arange(self.size)
        seen = index[:, None] >= index
        if scope is not None:
            spans = self.spans(scope, labels)
            seen = seen | ((spans[:, :, None] == spans[:, None, :]) & (spans >= 0)[:, :, None])
        together = documents[:, :, None] == documents[:, None, :]
        branch = (branches[:, :, None] == branches[:, None, :]) | (branches[:, None, :] == 0)
        valid = (documents >= 0)[:, :, None]
        return (seen & together & branch & valid) | (index[:, None] == index)

    def _documents(self) -> Tensor:
        """(B, S) int64: documents numbered in the order of their row, as equal ids apart are two; -1 padding."""
        ids = self.document_ids()
        found = torch.zeros_like(ids)
        found[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
        return found.masked_fill(ids < 0, PAD)

    def _filled(self, value) -> Tensor:  # type: ignore[no-untyped-def]
        found = torch.empty(len(self.rows), self.size, dtype=torch.int64)
        for number, row in enumerate(self.rows):
            for segment in row:
                found[number, segment.start : segment.stop] = value(segment)
        return found


def _segments(
    runs: Iterable[tuple[tuple[int, int, int], Iterator[Any]]],
    sizes: list[tuple[int, int, int]] | None,
    clips: list[int],
    number: int,
) -> Iterator[Segment]:
    """Those of a sequence, from runs of one (modality, document, branch)."""
    start = image = 0
    for (kind, document, branch), run in runs:
        stop = start + len(list(run))
        if kind <= TEXT:
            yield Segment(kind, start, stop - start, document, branch=branch)
            start = stop
        while start < stop:
            grid = None if sizes is None else _next_grid(sizes, image, stop - start, number)
            length = stop - start if grid is None else grid[0] * grid[1] * grid[2]
            clip = clips[image] if image < len(clips) else -1
            yield Segment(kind, start, length, document, image, grid, branch, clip)
            start, image = start + length, image + 1

    if sizes is not None and image != len(sizes):
        rule = f"are given, and the placeholders are those of {image} images"
        fix = "give one run of placeholders for each"
        raise invalid("grids", "number", len(sizes), rule, fix, where=f"row {number}")


def _next_grid(
    sizes: list[tuple[int, int, int]], image: int, left: int, number: int
) -> tuple[int, int, int]:
    grid = sizes[image] if image < len(sizes) else None
    if grid is None or grid[0] * grid[1] * grid[2] > left:
        rule = f"of image {image} must have as many tokens as there are placeholders left, {left}"
        fix = "expand each placeholder to the tokens (time, rows, columns) of its image"
        raise invalid("grids", "tokens", grid, rule, fix, where=f"row {number}")
    return grid


def _begins(row: Sequence[Segment], name: str) -> Iterator[tuple[Segment, int]]:
    """Each segment with its first position."""
    document, ends = None, {0: 0}  # where each branch has come to
    for segment in row:
        if segment.document_id != document:
            document, ends = segment.document_id, {0: 0}
        begin = ends.get(segment.branch, ends[0])
        yield segment, begin
        ends[segment.branch] = begin + int(_within(segment, name).max()) + 1


def _within(segment: Segment, name: str) -> Tensor:
    """Positions of a segment from 0, (3, length)."""
    length = segment.length
    if segment.modality <= TEXT or name == "sequential":
        return torch.arange(length).expand(3, -1)
    if name == "text_preserving":
        return torch.zeros(3, length, dtype=torch.int64)
    if segment.grid is None:
        rule = f"of the image at token {segment.start} must be given with positions 'mrope'"
        raise invalid("grids", "missing", ..., rule, "give grids to SequencePlan.of")
    axes = [torch.arange(n) for n in segment.grid]
    return torch.stack([axis.reshape(-1) for axis in torch.meshgrid(*axes, indexing="ij")])
