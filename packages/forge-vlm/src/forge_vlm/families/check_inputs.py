"""Inputs on which Forge's model and transformers' are compared: tokens of two lengths, and images of each kind of encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge_core import TransformerConfig
from forge_vlm._shared.problems import invalid

#: Tokens of the two rows of each length.
LENGTHS = (17, 64)
_TILED = ("idefics3", "smolvlm")


#: Tokens (2, S), and keywords of Forge's model and of transformers'.
Inputs = tuple[Tensor, dict[str, Any], dict[str, Any]]


class _Media(NamedTuple):
    """`runs` are (id of a placeholder, tokens) in each sequence; `theirs` makes transformers' keywords for the tokens."""

    runs: list[list[tuple[int, int]]]
    ours: dict[str, Tensor]
    theirs: Callable[[Tensor], dict[str, Tensor]]
    front: int = 1  # tokens of text before the first image


def inputs_of(model: Any, config: TransformerConfig, theirs: Any) -> list[Inputs]:
    """Text of both `LENGTHS`; of a VLMConfig one more, with an image in each sequence, of sizes that differ where the encoder
    takes such, and a video where it takes one. ValueError where `config.max_seq_len` has no room for it."""
    draw = torch.Generator().manual_seed(0)
    images = getattr(config, "placeholders", {})
    places = torch.tensor([m.first_id for m in images.values()], dtype=torch.long)
    text = next(i for i in range(config.vocab_size) if i not in places)

    def tokens_of(length: int) -> Tensor:
        tokens = torch.randint(config.vocab_size, (2, length), generator=draw)
        return torch.where(torch.isin(tokens, places), text, tokens)

    lengths = sorted({min(length, config.max_seq_len) for length in LENGTHS})
    found: list[Inputs] = [(tokens_of(length), {}, {}) for length in lengths]
    if images:
        media = _media_of(model, theirs, {name: m.first_id for name, m in images.items()}, draw)
        longest = media.front + max(sum(n + 1 for _, n in row) for row in media.runs)
        if longest > config.max_seq_len:
            rule = f"needs rows of {longest} tokens for an image, and max_seq_len is {config.max_seq_len}"
            raise invalid("", "length", ..., rule, "leave it out")
        tokens = tokens_of(min(longest + lengths[0], config.max_seq_len))
        for row, runs in zip(tokens, media.runs):
            start = media.front
            for place, count in runs:
                row[start : start + count] = place
                start += count + 1  # a token of text between them
        found.append((tokens, media.ours, media.theirs(tokens)))

    return found


def _media_of(model: Any, theirs: Any, ids: dict[str, int], draw: torch.Generator) -> _Media:
    names = tuple(model.vision.extra_inputs)
    if names == ("patches", "grids"):
        return _patches(model.vision, ids, draw)
    if names == ("images", "aspect_ratio_ids"):
        return _tiles(theirs.config.vision_config, ids["image"], draw)
    return _images(model, theirs.config.model_type, ids["image"], draw)


def _images(model: Any, model_type: str, place: int, draw: torch.Generator) -> _Media:
    """Images of the encoder's size; of one tile each, of which the second has padding below, in families of tiles."""
    shape = model.vision.dummy("cpu")["images"].shape[1:]  # (3, H, W)
    images = torch.randn(2, *shape, generator=draw)
    count = model.adapter(model.vision(images=images)).size(1)
    runs = [[(place, count)], [(place, count)]]
    if model_type not in _TILED:
        return _Media(runs, {"images": images}, lambda tokens: {"pixel_values": images})
    masks = torch.ones(2, *shape[1:], dtype=torch.uint8)
    masks[1, shape[1] * 2 // 3 :] = 0
    tiles = {"pixel_values": images[:, None], "pixel_attention_mask": masks[:, None].long()}
    return _Media(runs, {"images": images, "image_masks": masks}, lambda tokens: tiles)


def _patches(vision: Any, ids: dict[str, int], draw: torch.Generator) -> _Media:
    """An image in each sequence, wide and of other sizes, and a video of two frames after the second."""
    merge, (image, video) = vision.merge, (ids["image"], ids["video"])
    grids = [(1, 2 * merge, 3 * merge), (1, merge, 5 * merge), (2, merge, 2 * merge)]
    patches = [torch.randn(t * h * w, vision.patch_width, generator=draw) for t, h, w in grids]

    def theirs(tokens: Tensor) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.cat(patches[:2]),
            "image_grid_thw": torch.tensor(grids[:2]),
            "pixel_values_videos": patches[2],
            "video_grid_thw": torch.tensor(grids[2:]),
            "mm_token_type_ids": (tokens == image).int() + 2 * (tokens == video).int(),
        }

    runs = [[(image, 6)], [(image, 5), (video, 2), (video, 2)]]
    return _Media(runs, {"patches": torch.cat(patches), "grids": torch.tensor(grids)}, theirs)


def _tiles(vision: Any, place: int, draw: torch.Generator) -> _Media:
    """An image of one tile, and one of as many tiles as the least square shape of the encoder has; rows begin with them, as
    transformers differs from Meta's code for tokens that see none."""
    shapes: Sequence[Sequence[int]] = vision.supported_aspect_ratios
    wide = max(range(len(shapes)), key=lambda i: abs(shapes[i][0] - shapes[i][1]))
    ratios = torch.tensor([1 + list(map(list, shapes)).index([1, 1]), 1 + wide])  # ids from 1 on
    counts = [1, shapes[wide][0] * shapes[wide][1]]
    size, most = vision.image_size, vision.max_num_tiles
    images = torch.randn(2, most, 3, size, size, generator=draw)
    there = torch.arange(most) < torch.tensor(counts)[:, None]  # (2, tiles)
    images[~there] = 0.0

    def theirs(tokens: Tensor) -> dict[str, Tensor]:
        seen = there[:, None, None].expand(-1, tokens.size(1), -1, -1)  # (2, S, 1, tiles)
        return {
            "pixel_values": images[:, None],
            "aspect_ratio_ids": ratios[:, None],
            "aspect_ratio_mask": there[:, None].long(),
            "cross_attention_mask": seen.long(),
            "attention_mask": torch.ones_like(tokens),
        }

    ours = {"images": images, "aspect_ratio_ids": ratios}
    return _Media([[(place, 1)], [(place, 1)]], ours, theirs, front=0)
