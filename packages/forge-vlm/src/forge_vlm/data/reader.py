"""Records to samples and pictures to media, as the options of a source say."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forge_vlm.data.chat_template import TokenizerTemplate
from forge_vlm.data.errors import InvalidSample
from forge_vlm.data.options import resolution_of, video_of_options
from forge_vlm.data.pictures import Pictures
from forge_vlm.data.records import MOST_BYTES, MOST_PIXELS, Picture, Record
from forge_vlm.data.sample import Sample, sample_of
from forge_vlm.data.templates import END_TOKENS, TEMPLATES
from forge_vlm.data.tokenizer import NONE, JsonTokens, open_tokenizer
from forge_vlm.data.trees import check_ahead, paths_of, tree_of
from forge_vlm.data.video import expanded
from forge_vlm.resolution import Layout

__all__ = ["NEWER", "Decoder", "Reader", "identity_of", "pictures_of"]

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


def pictures_of(options: Mapping[str, Any], placeholder: str) -> Pictures:
    """What pictures are under the options of a source."""
    o = options
    sizes = o["patch_size"], o["merge"], o["patch_time"]
    config = resolution_of(o["resolution"] or {})
    limits = (o.get(name, NEWER[name]) for name in ("max_image_pixels", "max_image_bytes"))
    return Pictures(config, o["tokens_per_tile"] or 1, placeholder, o["mean"], *sizes, *limits)


def identity_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a fingerprint: newer ones are left out where they say nothing, so that older fingerprints hold, and those
    that refuse records and change none, and where files are."""
    return {
        k: v
        for k, v in options.items()
        if k not in ("ignore_keys", "strict", "images") and (k not in NEWER or v != NEWER[k])
    }


class Decoder:
    """Media of samples; what cannot be decoded ends the run or is masked, as `corrupt` says. `masked` counts the pictures
    that this process could not decode.

    With `masks` media have `image_masks` (N, H, W) uint8 beside `images`: 0 in the blank tiles that stand for damage."""

    def __init__(self, pictures: Pictures, corrupt: str, masks: bool = False) -> None:
        self.pictures, self.corrupt = pictures, corrupt
        self.masked = 0
        self._masks = masks

    def media(self, sample: Sample) -> tuple[list[dict[str, Tensor]], bool]:
        """Media of each picture of a sample, and whether all could be decoded; InvalidSample as `corrupt` says."""
        found, good = [], True
        for picture, layout in zip(sample.pictures, sample.layouts):
            try:
                found.append(self.decode(picture, layout))
            except InvalidSample as error:
                if self.corrupt == "raise":
                    raise
                if not self.masked:
                    print(f"data: {error}; its sample is not learnt", file=sys.stderr)
                self.masked += 1
                found.append(self._with_masks(self.pictures.blank(layout), 0))
                good = False
        for picture in sample.pictures:
            picture.release()
        return found, good

    def decode(self, picture: Picture, layout: Layout) -> dict[str, Tensor]:
        """Media of one picture; InvalidSample where it cannot be read or decoded."""
        return self._with_masks(
            self.pictures.media(self.pictures.read(picture), layout, picture.name, picture.caps), 1
        )

    def nothing(self) -> dict[str, Tensor]:
        """Media of no picture."""
        return self._with_masks(self.pictures.nothing(), 1)

    def _with_masks(self, media: dict[str, Tensor], seen: int) -> dict[str, Tensor]:
        if not self._masks:
            return media
        tiles = media["images"]  # (N, 3, H, W)
        return {**media, "image_masks": torch.full_like(tiles[:, 0], seen)}


class Reader(Decoder):
    """Tokens, template and pictures of the options of `Conversations`, all of them given; ValueError for what is missing."""

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
        self.branched = False  # rows that are read without counting have no branches
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
        """The sample of a record, and whether the headers of its pictures could be read, where they are."""
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
