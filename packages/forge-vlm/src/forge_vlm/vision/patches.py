"""Vision encoders of transformers that take patches of images of any sizes: Qwen3-VL.

Shapes: N images (or frames), P patches of all images, E numbers of a patch, M tokens of all images, D width of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge_core import Init
from forge_core.model import reset_by_table
from forge_vlm._shared.problems import invalid
from forge_vlm.vision.config import PATCH_MODELS, VisionConfig
from forge_vlm.vision.features import Features
from forge_vlm.vision.pixels import normalised, values_of
from forge_vlm.vision.transformers import blocks_of, build_config, init_of, with_buffers
from forge_vlm.work import ImageWork, Part, attended, image_work

__all__ = [
    "PATCH_MODELS",
    "Grid",
    "PatchEncoder",
    "check_patches",
    "checked_grids",
    "cut_patches",
    "grids_on_host",
    "num_layer_features",
]

Grid = tuple[int, int, int]


class PatchEncoder(nn.Module):
    """An encoder that takes `patches` (P, E) of all images one behind the other, and `grids` (N, 3) int64 with the
    (time, rows, columns) in patches of each: `cut_patches` makes both.

    Patches of a frame see each other and none of another frame (packed by cu_seqlens). `merge` * `merge` of them become
    one token, so an image has time * rows * columns / merge^2, of the decoder's width; `Features.layers` are those of
    earlier blocks (DeepStack). Patches are uint8, or floats that are normalised already. Grids stay on the host, which
    reads them: no sync; where they lie on an accelerator, one. Weights have the names that they have in transformers,
    below `model`. Raises ValueError for keys that its config does not have, and where transformers is not installed.
    """

    extra_inputs = ("patches", "grids")
    host_inputs = ("grids",)

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        if config.select_layer:
            kind = config.transformers["model_type"]
            rule = f"must be empty for {kind}, whose features are those of its end and of deepstack_visual_indexes"
            value = config.select_layer
            raise invalid("vision.select_layer", "foreign", value, rule, "leave it out")
        self.config = config
        own = build_config(config.transformers)
        from transformers import AutoModel

        self.model, self._buffers_at_start = with_buffers(lambda: AutoModel.from_config(own))
        self.width, self.merge = own.out_hidden_size, own.spatial_merge_size
        self.num_layer_features = num_layer_features(config)
        self.patch_size, self.patch_time = own.patch_size, own.temporal_patch_size
        self.channels = own.in_channels
        self.patch_width = own.in_channels * own.temporal_patch_size * own.patch_size**2

    def forward(self, patches: Any, grids: Any) -> Features:
        """Features of patches (P, E), with the layers behind; ValueError where the grids are not theirs."""
        values, sizes = values_of(patches), grids_on_host(grids)
        lengths = [t * h * w for t, h, w in checked_grids(sizes.tolist(), self.merge)]
        check_patches(values, lengths, self.patch_width)
        given = self._pixels(values)
        out = self.model(given, grid_thw=sizes, **self._places(sizes, given.device))
        return Features(out.pooler_output[None], layers=tuple(out.deepstack_features))

    def token_grids(self, patches: Any, grids: Any) -> list[Grid]:
        """(time, rows, columns) in tokens of each frame: frames of a video are images of their own, which the text of
        their timestamps parts."""
        return [
            (1, rows // self.merge, columns // self.merge)
            for time, rows, columns in checked_grids(grids_on_host(grids).tolist(), self.merge)
            for _ in range(time)
        ]

    def _pixels(self, patches: Tensor) -> Tensor:
        weight, c = next(self.model.parameters()), self.config
        by_channel = patches.unflatten(1, (self.channels, -1, 1))  # (P, channels, E / channels, 1)
        return normalised(by_channel, *c.pixels, weight.dtype).flatten(1)

    def _places(self, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """What the model would derive from grids, from those of the host: on an accelerator each would be a sync."""
        from transformers import vision_utils as vision

        table, weights = vision.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=self.model.num_grid_per_side,
            mode=self.model.interpolation_mode,
            align_corners=self.model.interpolation_align_corners,
            spatial_merge_size=self.merge,
        )
        turns = vision.get_vision_position_ids(grids, self.merge)
        moved = {"interp_indices": table, "interp_weights": weights, "position_ids": turns}
        return {
            "cu_seqlens": vision.get_vision_cu_seqlens(grids),  # on the host, which splits by them
            **{name: tensor.to(device, non_blocking=True) for name, tensor in moved.items()},
        }

    def reset_parameters(self) -> None:
        """Draw initial values as `init_table` has them, also after `to_empty`."""
        reset_by_table(self)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Weights are normal, scales of norms one, biases zero; buffers have what transformers gives them."""
        table = {f"model.{n}": init_of(n, p, std) for n, p in self.model.named_parameters()}
        return table | {f"model.{n}": Init("values", b) for n, b in self._buffers_at_start.items()}

    def blocks(self) -> list[nn.Module]:
        """In order of depth."""
        return blocks_of(self.model)

    def _side(self, pixels: int | None) -> int:
        """Tokens in a row of a square image."""
        return max(
            1, round((pixels or 512**2) ** 0.5 / (self.model.config.patch_size * self.merge))
        )

    def media_of(self, images: int, pixels: int | None, device: Any) -> dict[str, Tensor]:
        """Media of so many black images."""
        side = self._side(pixels) * self.merge
        patches = next(self.model.parameters()).new_zeros(
            images * side * side, self.patch_width, device=device
        )
        return {"patches": patches, "grids": torch.tensor([[1, side, side]] * images)}

    def image_work(self, pixels: int | None = None) -> ImageWork:
        """An image of about so many pixels, by default 512 * 512."""
        own, side = self.model.config, self._side(pixels)
        tokens = side * side
        patches, blocks = tokens * self.merge**2, self.blocks()
        inside = {m for block in blocks for m in block.modules()}
        parts: list[Part] = [(block, patches) for block in blocks]
        for module in self.model.modules():
            if isinstance(module, nn.Conv3d):
                parts.append((module, patches))
            elif isinstance(module, nn.Linear) and module not in inside:
                parts.append((module, tokens))  # those that merge patches
        scores = len(blocks) * attended(patches, patches, own.hidden_size)
        return image_work(tokens, side, side, parts, scores)

    def dummy(self, device: Any) -> dict[str, Tensor]:
        """Media of one image of one token, for a batch without any."""
        weight, side = next(self.model.parameters()), self.merge
        return {
            "patches": weight.new_zeros(side * side, self.patch_width, device=device),
            "grids": torch.tensor([[1, side, side]]),
        }


def num_layer_features(config: VisionConfig) -> int:
    """How many features an encoder gives that are added after the first blocks of the decoder, one after each."""
    if config.name != "transformers" or config.transformers["model_type"] not in PATCH_MODELS:
        return 0
    return len(build_config(config.transformers).deepstack_visual_indexes)


def grids_on_host(grids: Any) -> Tensor:
    """The grids (N, 3) int64 of all rows; ValueError for another shape or dtype."""
    found = values_of(grids).cpu()
    if found.dim() != 2 or found.size(1) != 3 or found.dtype not in (torch.int64, torch.int32):
        rule = f"and {found.dtype} must be (N, 3) and int64: (time, rows, columns) in patches of each image"
        raise invalid("grids", "shape", tuple(found.shape), rule, "cut_patches makes them")
    return found


def checked_grids(grids: Sequence[Sequence[int]], merge: int) -> Sequence[Sequence[int]]:
    """The (time, rows, columns) of images as they are; ValueError where `merge` does not divide rows and columns."""
    for grid in grids:
        if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            rule = f"must be (time, rows, columns) in patches, with rows and columns that {merge} divides"
            raise invalid("grids", "divides", list(grid), rule, "resize the image")
    return grids


def check_patches(patches: Tensor, lengths: Sequence[int], width: int) -> None:
    """ValueError for patches that are not (P, E = `width`), with those of images of `lengths`."""
    wanted = (sum(lengths), width)
    if patches.shape != wanted:
        rule = f"must be {wanted}, those of the {len(lengths)} images of grids"
        value = tuple(patches.shape)
        raise invalid("patches", "shape", value, rule, "give both of the same images")


def cut_patches(
    frames: Tensor, patch_size: int = 16, merge: int = 2, time: int = 2
) -> tuple[Tensor, Tensor]:
    """Patches (P, E) and grid (1, 3) of an image or of the frames of a video (F, C, H, W).

        patches, grid = cut_patches(torch.zeros(1, 3, 64, 96))       # (24, 1536), [[1, 4, 6]]

    `time` frames are cut together, and the last one is repeated until it divides them. The patches of a token stand
    together. ValueError unless patch_size * merge divides height and width.
    """
    height, width = frames.shape[-2:]
    side = patch_size * merge
    if height % side or width % side:
        rule = f"(height, width) must be sides that {side} divides"
        raise invalid("frames", "divides", (height, width), rule, "resize it")
    missing = -len(frames) % time
    frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    x = frames.unflatten(0, (-1, time))  # (T, time, C, H, W)
    x = x.unflatten(4, (-1, merge, patch_size)).unflatten(3, (-1, merge, patch_size))
    # (T, time, C, rows, merge, size, columns, merge, size): tokens, then their patches, then what a patch holds
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    grid = torch.tensor([[len(x), height // patch_size, width // patch_size]])
    return x.reshape(-1, x[0, 0, 0, 0, 0].numel()), grid
