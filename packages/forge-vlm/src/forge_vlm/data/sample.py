"""Encode a record as tokens, labels, weights and images, as the options of a source set it.

L   tokens of a sample        P   tokens that all branches share        K   branches
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import problems_of
from forge_vlm.data.files import InvalidSample, invalid
from forge_vlm.data.images import ImageProcessor
from forge_vlm.data.options import resolution_of, video_of_options
from forge_vlm.data.records import MOST_BYTES, MOST_PIXELS, TRAINED_ROLES, EncodedImage, Record
from forge_vlm.data.templates import (
    END_TOKENS,
    TEMPLATES,
    ChatSegment,
    Template,
    TokenizerTemplate,
    segments_of,
)
from forge_vlm.data.tokenizer import NONE, JsonTokens, Tokens, open_tokenizer
from forge_vlm.data.video import expanded
from forge_vlm.resolution import Layout
from forge_vlm.sequence.plan import IGNORE

__all__ = [
    "NEWER",
    "MediaDecoder",
    "Sample",
    "SampleEncoder",
    "check_ahead",
    "check_labels",
    "identity_of",
    "paths_of",
    "pictures_of",
    "sample_of",
    "tree_of",
]

_COPIES = 0.9


class Sample(NamedTuple):
    """Tokens (L,) with as many placeholders as images have tokens; labels (L,), already shifted: the token after each
    where it is trained, -100 elsewhere; weights (L,) fp32 of the labels; images in the order of their places, with
    their layouts; grids of all their tiles, and `clips` the number of the image that each is of; branches (L,) of a tree
    of answers, 0 where these share."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    pictures: tuple[EncodedImage, ...]
    layouts: tuple[Layout, ...]
    grids: tuple[tuple[int, int, int], ...]
    clips: tuple[int, ...] = ()
    branches: np.ndarray | None = None


def sample_of(
    record: Record,
    layouts: Sequence[Layout],
    tokenizer: Tokens,
    pictures: ImageProcessor,
    template: Template,
    weigh: str = "token",
) -> Sample:
    """The sample of a record whose images have `layouts`, after the tokens that begin a text. Answers and their ends are
    trained; the last token of a prompt predicts the first.

    `weigh`: "token" 1 for each label; "sample" 1 / n of the sample's n labels; "sqrt" 1 / sqrt(n) (InternVL3.5, section
    3); "message" 1 / n of the labels of its message. A message's own weight multiplies them; one of 0 is not trained.
    """
    pieces: list[ChatSegment] = []
    for piece in segments_of(record, template):
        text = pictures.text(layouts[piece.picture]) if piece.kind == "image" else piece.text
        pieces.append(piece._replace(text=text))

    first = pieces[0] if pieces else ChatSegment("")
    # a template that writes the tokens that begin a text does not get a second
    if not (
        first.kind in ("special", "template") and first.text.startswith("".join(tokenizer.begin))
    ):
        pieces[:0] = [ChatSegment(name, "special") for name in tokenizer.begin]

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
    own = np.array([m.weight for m in record.messages if m.role in TRAINED_ROLES])
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


def _clips(pictures: Sequence[EncodedImage], grids: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """For each grid the number of the image that it is of; frames of one video have one number."""
    owners = [id(getattr(picture, "clip", None) or picture) for picture in pictures]
    numbers = {owner: n for n, owner in enumerate(dict.fromkeys(owners))}
    return tuple(numbers[owner] for owner, own in zip(owners, grids) for _ in own)


def _weights(answers: np.ndarray, own: np.ndarray, weigh: str) -> np.ndarray:
    """Of labels (L,) by the answer of each, -1 for none; 1 where there is no label."""
    labeled = answers >= 0
    weights = np.ones(len(answers))
    if weigh == "message":
        weights = 1.0 / np.bincount(answers[labeled], minlength=len(own)).clip(1)[answers]
    elif weigh != "token":
        count = max(1, int(labeled.sum()))
        weights /= count if weigh == "sample" else count**0.5
    return np.where(labeled, weights * own[answers], 1.0).astype(np.float32)


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


def paths_of(record: Record) -> list[Record]:
    """The conversation of each branch, with the messages that all share before it; the record itself without branches."""
    if not record.branches:
        return [record]
    return [
        replace(record, messages=(*record.messages, *branch), branches=())
        for branch in record.branches
    ]


def tree_of(name: str, paths: Sequence[Sample], image_id: int) -> Sample:
    """One sample of the K conversations of a record, whose loss is the sum of theirs.

    Shared is what all have in common from the beginning, tokens and labels; the labels there weigh what they weigh in all
    together. Raises InvalidSample where an image is not shared, as after one the first trained token follows at once.
    """
    shared = _shared(paths)
    first = paths[0]
    held = int((first.tokens[:shared] == image_id).sum())
    if any(int((path.tokens == image_id).sum()) != held for path in paths):
        rule = "must share all pictures, and a text after them that is not trained"
        fix = "use a template with a text before answers (not 'plain'), or a record for each"
        raise invalid("branches", "picture", ..., rule, fix, where=name)

    rests = [path.tokens[shared:] for path in paths]
    numbers = [np.zeros(shared, np.int64)]
    numbers += [np.full(len(rest), n, np.int64) for n, rest in enumerate(rests, 1)]
    together = np.stack([path.weights[:shared] for path in paths]).sum(0)
    common = np.where(first.labels[:shared] == IGNORE, 1.0, together).astype(np.float32)
    return first._replace(
        tokens=np.concatenate([first.tokens[:shared], *rests]),
        labels=np.concatenate([first.labels[:shared], *(path.labels[shared:] for path in paths)]),
        weights=np.concatenate([common, *(path.weights[shared:] for path in paths)]),
        branches=np.concatenate(numbers),
    )


def _shared(paths: Sequence[Sample]) -> int:
    """How many tokens from the beginning are equal in all, and predict the same."""
    shortest = min(len(path.tokens) for path in paths)
    same = np.ones(shortest, bool)
    for path in paths[1:]:
        for mine, other in ((paths[0].tokens, path.tokens), (paths[0].labels, path.labels)):
            same &= mine[:shortest] == other[:shortest]
    return shortest if same.all() else int(np.argmin(same))


def check_ahead(name: str, sample: Sample, scope: str, image_id: int) -> None:
    """InvalidSample where a trained token stands between images that see each other, through which it would be seen before
    it is predicted, and for branches of which the questions would be no part of the prefix."""
    if scope == "prefix_lm" and sample.branches is not None:
        rule = "have no prefix of their own with bidirectional 'prefix_lm'"
        raise invalid("branches", "prefix", ..., rule, "write a record for each", where=name)
    if scope not in ("clip", "document"):
        return
    places = np.flatnonzero(sample.tokens == image_id)
    sizes = [time * rows * columns for time, rows, columns in sample.grids]
    clips = np.repeat(sample.clips, sizes) if scope == "clip" else np.zeros(len(places), np.int64)
    labeled = np.flatnonzero(sample.labels != IGNORE)
    for clip in np.unique(clips):
        mine = places[clips == clip]
        if ((labeled >= mine[0]) & (labeled < mine[-1])).any():
            rule = "excludes trained text between pictures that see each other, as the later ones have read it"
            raise invalid("bidirectional", "between", scope, rule, "use 'image'", where=name)


NEWER = {
    "bidirectional": "none",
    "image_masks": False,
    "group": None,
    "max_image_pixels": MOST_PIXELS,
    "max_image_bytes": MOST_BYTES,
    "ignore_keys": [],
    "strict": False,
    "images": None,
}  # options, and what says nothing


def pictures_of(options: Mapping[str, Any], placeholder: str) -> ImageProcessor:
    """What images are under the options of a source."""
    o = options
    sizes = o["patch_size"], o["merge"], o["patch_time"]
    config = resolution_of(o["resolution"] or {})
    limits = (o.get(name, NEWER[name]) for name in ("max_image_pixels", "max_image_bytes"))
    return ImageProcessor(
        config, o["tokens_per_tile"] or 1, placeholder, o["mean"], *sizes, *limits
    )


def identity_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a fingerprint: newer ones are left out where they say nothing, so that older fingerprints hold, and those
    that reject records and change none, and where files are."""
    return {
        k: v
        for k, v in options.items()
        if k not in ("ignore_keys", "strict", "images") and (k not in NEWER or v != NEWER[k])
    }


class MediaDecoder:
    """Media of samples; what cannot be decoded ends the run or is masked, as `corrupt` says. `masked` counts the images
    that this process could not decode.

    With `masks` media have `image_masks` (N, H, W) uint8 next to `images`: 0 in the blank tiles that stand for damage."""

    image_id: int
    bidirectional = (
        "none"  # or a scope of `SequencePlan.spans`: which tokens also attend to later ones
    )
    branched = False  # whether a sample has branches

    def __init__(self, pictures: ImageProcessor, corrupt: str, masks: bool = False) -> None:
        self.pictures, self.corrupt = pictures, corrupt
        self.masked = 0
        self._masks = masks

    def media(self, sample: Sample) -> tuple[list[dict[str, Tensor]], bool]:
        """Media of each image of a sample, and whether all could be decoded; InvalidSample as `corrupt` says."""
        found, good = [], True
        for picture, layout in zip(sample.pictures, sample.layouts):
            try:
                found.append(self.decode(picture, layout))
            except InvalidSample as error:
                if self.corrupt == "raise":
                    raise
                if not self.masked:
                    print(f"data: {error}; its sample is not trained", file=sys.stderr)
                self.masked += 1
                found.append(self._with_masks(self.pictures.blank(layout), 0))
                good = False
        for picture in sample.pictures:
            picture.release()
        return found, good

    def decode(self, picture: EncodedImage, layout: Layout) -> dict[str, Tensor]:
        """Media of one image; InvalidSample where it cannot be read or decoded."""
        return self._with_masks(
            self.pictures.media(self.pictures.read(picture), layout, picture.name, picture.caps), 1
        )

    def nothing(self) -> dict[str, Tensor]:
        """Media of no image."""
        return self._with_masks(self.pictures.nothing(), 1)

    def _with_masks(self, media: dict[str, Tensor], seen: int) -> dict[str, Tensor]:
        if not self._masks:
            return media
        tiles = media["images"]  # (N, 3, H, W)
        return {**media, "image_masks": torch.full_like(tiles[:, 0], seen)}


class SampleEncoder(MediaDecoder):
    """Tokens, template and images of the options of `VisionChatSource`, all of them given; ValueError for what is missing."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        o = options
        own = None
        if o["template"] == "tokenizer":
            own = TokenizerTemplate(o["tokenizer"], o["eos"], o["image"])
        eos = own.eos if own else o["eos"] or END_TOKENS.get(o["template"])
        self.tokens = open_tokenizer(o["tokenizer"], eos, o["image"], o["bos"])
        self.template = own or TEMPLATES[o["template"]]
        pictures = pictures_of(options, self.tokens.image)
        super().__init__(pictures, o["corrupt"], o["image_masks"])
        self.image_id = self.tokens.image_id
        self._weigh = o["weigh"]
        self._of_header = (
            resolution_of(o["resolution"] or {}).name != "fixed" or self.corrupt == "skip"
        )
        #: The options as plain data, with digests in place of files: what determines the samples of a record.
        self.identity = identity_of({**options, "tokenizer": self.tokens.fingerprint})
        self._video, self.bidirectional = video_of_options(o["video"] or {}), o["bidirectional"]
        if own is not None:
            self.identity["chat_template"] = own.fingerprint
        # what the tokenizer's files decide: older fingerprints, of sources without it, hold
        if o["bos"] is None and self.tokens.begin:
            self.identity["begin"] = list(self.tokens.begin)
        elif o["bos"] in NONE and isinstance(self.tokens, JsonTokens):
            self.identity["bos"] = None  # which was no token before files of a tokenizer decided
        end = getattr(self.tokens, "eos", None)
        if own is None and o["eos"] is None and end not in (None, "</s>", "<|im_end|>"):
            self.identity["end"] = end

    def sample(self, record: Record) -> tuple[Sample, bool]:
        """The sample of a record, and whether the headers of its images could be read, where they are."""
        layouts = []
        record, good = expanded(record, self._video, keep=self.corrupt != "raise")

        for picture in record.pictures:
            self.pictures.resolution_of(picture.caps, picture.name)  # wrong bounds are no damage
            layout = self.pictures.blank_layout()
            try:
                if self._of_header and picture.size is not None:
                    layout = self.pictures.resolution.layout(*picture.size)
                elif self._of_header:
                    content = self.pictures.read(picture)
                    layout = self.pictures.layout(content, picture.name, picture.caps)
            except InvalidSample:
                if self.corrupt == "raise":
                    raise
                good = False
            layouts.append(layout)

        arguments = self.tokens, self.pictures, self.template, self._weigh
        found = [sample_of(path, layouts, *arguments) for path in paths_of(record)]
        sample = found[0] if len(found) == 1 else tree_of(record.name, found, self.image_id)
        check_ahead(record.name, sample, self.bidirectional, self.image_id)
        return sample, good


__getattr__ = renamed(__name__)
