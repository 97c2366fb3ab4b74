"""A record as tokens, labels and weights.

L   tokens of a sample
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from forge_vlm._shared.problems import problems_of
from forge_vlm.data.errors import InvalidSample, invalid
from forge_vlm.data.pictures import Pictures
from forge_vlm.data.records import LEARNT, Picture, Record
from forge_vlm.data.templates import Piece, Template, pieces_of
from forge_vlm.data.tokenizer import Tokens
from forge_vlm.plan import IGNORE
from forge_vlm.resolution import Layout

__all__ = ["WEIGHTS", "Sample", "check_labels", "sample_of"]

WEIGHTS = ("token", "sample", "sqrt", "message")
_COPIES = 0.9


class Sample(NamedTuple):
    """Tokens (L,) with as many placeholders as pictures have tokens; labels (L,), already shifted: the token behind each
    where it is learnt, -100 elsewhere; weights (L,) fp32 of the labels; pictures in the order of their places, with
    their layouts; grids of all their tiles, and `clips` the number of the picture that each is of; branches (L,) of a tree
    of answers, 0 where these share."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    pictures: tuple[Picture, ...]
    layouts: tuple[Layout, ...]
    grids: tuple[tuple[int, int, int], ...]
    clips: tuple[int, ...] = ()
    branches: np.ndarray | None = None


def sample_of(
    record: Record,
    layouts: Sequence[Layout],
    tokenizer: Tokens,
    pictures: Pictures,
    template: Template,
    weigh: str = "token",
) -> Sample:
    """The sample of a record whose pictures have `layouts`, after the tokens that begin a text. Answers and their ends are
    learnt; the last token of a prompt predicts the first.

    `weigh`: "token" 1 for each label; "sample" 1 / n of the sample's n labels; "sqrt" 1 / sqrt(n) (InternVL3.5, section
    3); "message" 1 / n of the labels of its message. A message's own weight multiplies them; one of 0 is not learnt.
    """
    pieces: list[Piece] = []
    for piece in pieces_of(record, template):
        text = pictures.text(layouts[piece.picture]) if piece.kind == "image" else piece.text
        pieces.append(piece._replace(text=text))
    first = pieces[0] if pieces else Piece("")
    # a template that writes the tokens that begin a text does not get a second
    if not (
        first.kind in ("special", "template") and first.text.startswith("".join(tokenizer.begin))
    ):
        pieces[:0] = [Piece(name, "special") for name in tokenizer.begin]
    try:
        ids, owners = tokenizer.encode(pieces)
    except InvalidSample as error:
        raise InvalidSample(problems_of(error), record.name) from None
    order = [piece.picture for piece in pieces if piece.kind == "image"]
    each = [pictures.grids(layouts[i]) for i in order]
    grids = tuple(grid for own in each for grid in own)
    times = np.ones(len(ids), np.int64)
    times[ids == tokenizer.image_id] = [time * rows * columns for time, rows, columns in grids]
    tokens = np.repeat(ids, times)  # (L,)
    own = np.array([m.weight for m in record.messages if m.role in LEARNT])
    answers = np.repeat(np.array([piece.answer for piece in pieces], np.int64)[owners], times)
    answers[(answers >= 0) & (own[answers] == 0)] = -1
    behind = np.append(answers[1:], -1)  # (L,) the answer of each label
    labels = np.where(behind >= 0, np.append(tokens[1:], 0), IGNORE)
    return Sample(
        tokens,
        labels,
        _weights(behind, own, weigh),
        tuple(record.pictures[i] for i in order),
        tuple(layouts[i] for i in order),
        grids,
        _clips([record.pictures[i] for i in order], each),
    )


def _clips(pictures: Sequence[Picture], grids: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """For each grid the number of the picture that it is of; frames of one video have one number."""
    owners = [id(getattr(picture, "clip", None) or picture) for picture in pictures]
    numbers = {owner: n for n, owner in enumerate(dict.fromkeys(owners))}
    return tuple(numbers[owner] for owner, own in zip(owners, grids) for _ in own)


def _weights(answers: np.ndarray, own: np.ndarray, weigh: str) -> np.ndarray:
    """Of labels (L,) by the answer of each, -1 for none; 1 where there is no label."""
    learnt = answers >= 0
    weights = np.ones(len(answers))
    if weigh == "message":
        weights = 1.0 / np.bincount(answers[learnt], minlength=len(own)).clip(1)[answers]
    elif weigh != "token":
        count = max(1, int(learnt.sum()))
        weights /= count if weigh == "sample" else count**0.5
    return np.where(learnt, weights * own[answers], 1.0).astype(np.float32)


def check_labels(tokens: np.ndarray, labels: np.ndarray) -> None:
    """InvalidSample where over 90 % of the labels are the token of their own position: a model would learn to copy. For
    labels that others made. Labels before an equal token are not counted: shifted or not, they are the same.

    Arrays (..., S) of consecutive tokens. Usage: `check_labels(batch.tokens.numpy(), batch.labels.numpy())`.
    """
    counted = labels != IGNORE
    counted[..., :-1] &= tokens[..., :-1] != tokens[..., 1:]
    copies, count = int((labels == tokens)[counted].sum()), int(counted.sum())
    if copies > _COPIES * count:
        rule = f"of {count} are the token of their own position, and must be the next token"
        raise invalid("labels", "unshifted", copies, rule, "shift them by one")
