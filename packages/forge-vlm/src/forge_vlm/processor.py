"""Images and text as the inputs of a model: pixels or patches, and token ids with a placeholder for each image token.

Shapes: B sequences, S tokens of the longest, N tiles of all images, P patches of all images, E numbers of a patch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from forge_core.families import PretrainedFolder
from forge_vlm._shared.problems import invalid
from forge_vlm._shared.special_tokens import end_tokens
from forge_vlm.config import VLMConfig
from forge_vlm.families import FAMILIES
from forge_vlm.resolution import BudgetConfig, FixedConfig, ResolutionConfig, build_resolution
from forge_vlm.vision import cut_patches

__all__ = ["Processor"]

#: Filters of pillow by their numbers in a `preprocessor_config.json`.
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
_FAMILIES = ("llava", "qwen3_vl")


class Processor:
    """Processor of texts and images: makes the inputs of a `VLM`.

        processor = Processor.from_pretrained("llava-1.5-7b-hf")
        inputs = processor("USER: <image>\\nWhat is this? ASSISTANT:", image)
        answer = model.generate(**inputs, max_new_tokens=20, eos_id=processor.eos_id)
        print(processor.decode(answer[0]))

    A text has one `placeholder` for each of its images, which becomes as many as the image has tokens. For a model of
    your own give its parts:

    tokenizer: `encode(text)` returns ids, or an object with `ids`; `decode(ids)` returns text.
    resolution: how images are resized and split. Under "budget" the model takes patches, else images.
    placeholder, image_id: the text of the placeholder, and its id: `first_id` of the modality.
    tokens_per_tile: tokens that the adapter makes of one tile; not used under "budget".
    mean: color of padded borders. patch_size, merge, time: those of the encoder, under "budget".
    eos_id: ids that end an answer. padding_side: where shorter sequences are padded.

    Raises ValueError for numbers that do not fit. Needs `forge-vlm[data]`.
    """

    def __init__(
        self,
        tokenizer: Any,
        resolution: ResolutionConfig,
        *,
        placeholder: str,
        image_id: int,
        tokens_per_tile: int = 1,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        patch_size: int = 16,
        merge: int = 2,
        time: int = 2,
        eos_id: Sequence[int] = (),
        padding_side: Literal["left", "right"] = "left",
    ) -> None:
        if padding_side not in ("left", "right"):
            rule = "must be 'left' or 'right'"
            raise invalid("padding_side", "unknown", padding_side, rule, "use 'left'")
        if tokens_per_tile < 1:
            rule, fix = "must be at least 1", "use that of the model's adapter"
            raise invalid("tokens_per_tile", "range", tokens_per_tile, rule, fix)
        self.tokenizer, self.resolution = tokenizer, build_resolution(resolution, mean)
        self.placeholder, self.image_id = placeholder, image_id
        self.eos_id, self.padding_side = tuple(eos_id), padding_side
        self.budget = resolution.name == "budget"
        self._tokens, self._patches = tokens_per_tile, (patch_size, merge, time)
        ids = self._encode(placeholder)
        if ids.count(image_id) != 1:
            rule = f"must be one token with the id {image_id}, and its ids are {ids}"
            raise invalid("placeholder", "token", placeholder, rule, "name the token of images")

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        padding_side: Literal["left", "right"] = "left",
    ) -> Processor:
        """Read a local Hugging Face folder of LLaVA or Qwen3-VL: config.json, its image processor and tokenizer.json.

        Texts begin and end with the tokens that the tokenizer's post-processor writes. Raises ValueError for another
        family, and for keys of the image processor that change pixels and are not known.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            rule, fix = "needs the tokenizers library", "pip install 'forge-vlm[data]'"
            raise invalid("tokenizer", "requires", "tokenizers", rule, fix) from error
        found = PretrainedFolder(folder, FAMILIES)
        table, config, name = found.processor(), found.config, found.family.name
        if name not in _FAMILIES:
            fix = f"use one of {', '.join(_FAMILIES)}, or give the parts: Processor(tokenizer, ...)"
            raise invalid("model_type", "unsupported", name, "has no processor here", fix)
        if not table:
            rule, fix = "has no preprocessor_config.json", "give the folder of a full model"
            raise invalid("folder", "missing", str(found.path), rule, fix)

        tokenizer = Tokenizer.from_file(str(found.path / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        image_id = config.modalities["image"].first_id
        placeholder = tokenizer.id_to_token(image_id)
        if placeholder is None:
            rule, fix = "is no id of tokenizer.json", "give the model's own tokenizer"
            raise invalid("image_id", "token", image_id, rule, fix)

        read = _llava if name == "llava" else _qwen
        resolution, sizes = read(config, table)
        return cls(
            tokenizer,
            resolution,
            placeholder=placeholder,
            image_id=image_id,
            mean=table.get("image_mean") or (0.5, 0.5, 0.5),
            eos_id=[number for number, _ in end_tokens(tokenizer, found.path).tokens],
            padding_side=padding_side,
            **sizes,
        )

    def __call__(
        self, text: str | Sequence[str], images: Any = None, *, padding: bool = True
    ) -> dict[str, Any]:
        """Return the inputs of one text or of several, as keywords of `model(...)` and `model.generate(...)`.

        images: pillow images or (H, W, 3) uint8, in the order of the placeholders of all texts: one, a list, or a list
        for each text. padding: False raises ValueError for texts of different lengths.

        tokens        (B, S) int64
        document_ids  (B, S) int64: 0, and -1 where a shorter sequence is padded. Padding is never seen
        images        (N, 3, H, W) uint8, which the model normalizes; or, under "budget",
        patches       (P, E) uint8, and `grids` (images, 3): time, rows and columns in patches

        Raises ValueError for another number of images than of placeholders.
        """
        texts = [text] if isinstance(text, str) else list(text)
        pictures = _flat(images)
        marks = sum(part.count(self.placeholder) for part in texts)
        if marks != len(pictures):
            rule = f"must be as many as the placeholders {self.placeholder!r} of the texts, {marks}"
            fix = "write one placeholder for each image"
            raise invalid("images", "number", len(pictures), rule, fix)

        tiles = [self.resolution(picture) for picture in pictures]
        rest = iter([self._text_of(tile) for tile in tiles])
        rows = []
        for part in texts:
            first, *others = part.split(self.placeholder)
            rows.append(self._encode("".join([first, *(next(rest) + o for o in others)])))
        return {**self._batch(rows, padding), **self._media(tiles)}

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of new tokens (N,) up to the first end token."""
        kept: list[int] = []
        for number in ids.tolist() if isinstance(ids, Tensor) else ids:
            if number in self.eos_id:
                break
            kept.append(number)
        return str(self.tokenizer.decode(kept))

    def batch_decode(self, ids: Iterable[Tensor | Sequence[int]]) -> list[str]:
        """Return the texts of new tokens (B, N)."""
        return [self.decode(row) for row in ids]

    def _encode(self, text: str) -> list[int]:
        found = self.tokenizer.encode(text)
        return list(getattr(found, "ids", found))

    def _text_of(self, tiles: Tensor) -> str:
        """What stands for an image of these tiles (N, 3, H, W) in a text."""
        size, merge, _ = self._patches
        height, width = tiles.shape[2:]
        tokens = height * width // (size * merge) ** 2 if self.budget else self._tokens
        layout = self.resolution.layout(height, width)
        if not self.budget and len(tiles) != layout.num_tiles:
            rule = "splits images into tiles, whose text depends on the size of the image"
            fix = "use 'fixed' or 'budget'"
            raise invalid("resolution.name", "unsupported", len(tiles), rule, fix)
        return self.resolution.text(layout, tokens, self.placeholder)

    def _batch(self, rows: Sequence[Sequence[int]], padding: bool) -> dict[str, Tensor]:
        longest = max(map(len, rows), default=0)
        if not padding and any(len(row) < longest for row in rows):
            rule = "must be True for texts of different lengths"
            raise invalid("padding", "lengths", padding, rule, "leave it out, or give one text")
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        # any id of text: what stands at padding is not seen, and a placeholder would want an image
        tokens += int(self.image_id == 0)
        document_ids = torch.full_like(tokens, -1)
        for i, row in enumerate(rows):
            first = longest - len(row) if self.padding_side == "left" else 0
            tokens[i, first : first + len(row)] = torch.tensor(row, dtype=torch.int64)
            document_ids[i, first : first + len(row)] = 0
        return {"tokens": tokens, "document_ids": document_ids}

    def _media(self, tiles: Sequence[Tensor]) -> dict[str, Tensor]:
        if not tiles:
            return {}
        if not self.budget:
            return {"images": torch.cat([*tiles])}
        cut = [cut_patches(tile, *self._patches) for tile in tiles]
        return {
            "patches": torch.cat([patches for patches, _ in cut]),
            "grids": torch.cat([grid for _, grid in cut]),
        }


def _flat(images: Any) -> list[Any]:
    """One image, a list of them, or a list for each text, as one list."""
    if images is None:
        return []
    if not isinstance(images, list | tuple):
        return [images]
    return [image for part in images for image in _flat(part)]


def _llava(config: VLMConfig, table: Mapping[str, Any]) -> tuple[ResolutionConfig, dict[str, int]]:
    """Squares: CLIP crops at the center, SigLIP stretches, LLaVA's own pads."""
    from forge_vlm.vision.transformers import build_config, front_tokens

    own, size = build_config(config.vision.transformers), table.get("size") or {}
    side = size.get("shortest_edge") or size.get("height")
    crop = (table.get("crop_size") or {}).get("height", side)
    fit = "pad" if table.get("do_pad") else "crop" if table.get("do_center_crop") else "stretch"
    wanted = own.image_size
    for key, value in (("size", side), ("crop_size", crop if fit == "crop" else side)):
        if value != wanted:
            rule = f"must be the image_size {wanted} of the encoder"
            raise invalid(key, "size", value, rule, "give the folder's own image processor")
    fixed: Any = FixedConfig(wanted, fit, _filter(table))  # type: ignore[arg-type]
    tokens = (wanted // own.patch_size) ** 2
    if config.vision.select_feature == "cls_patch":
        tokens += front_tokens(config.vision.transformers)
    return ResolutionConfig("fixed", fixed=fixed), {"tokens_per_tile": tokens}


def _qwen(config: VLMConfig, table: Mapping[str, Any]) -> tuple[ResolutionConfig, dict[str, int]]:
    """The image's own aspect between two numbers of pixels."""
    size = table.get("size") or {}
    least = table.get("min_pixels") or size.get("shortest_edge")
    most = table.get("max_pixels") or size.get("longest_edge")
    patch, merge = table.get("patch_size", 16), table.get("merge_size", 2)
    budget: Any = BudgetConfig(patch * merge, least, most, _filter(table))  # type: ignore[arg-type]
    sizes = {"patch_size": patch, "merge": merge, "time": table.get("temporal_patch_size", 2)}
    return ResolutionConfig("budget", budget=budget), sizes


def _filter(table: Mapping[str, Any]) -> str:
    """The filter of an image processor; ValueError for one that changes pixels in another way."""
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if table.get(key, True) is not True:
            rule, fix = "must be true", "resize and normalize images as the model was trained"
            raise invalid(key, "unsupported", table[key], rule, fix)
    number = table.get("resample", 3)
    if number not in _FILTERS:
        rule = f"must be one of {', '.join(map(str, _FILTERS))}"
        raise invalid("resample", "unsupported", number, rule, "use 3 (bicubic)")
    return _FILTERS[number]
