"""Vision encoders of transformers that take patches of images of any sizes: Qwen3-VL.

Shapes: N images (or frames), P patches of all images, E numbers of a patch, M tokens of all images, D width of the stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core import Init
from forge_core.model import reset_by_table
from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import invalid
from forge_vlm.flops import ImageWork, Part, attended, image_work
from forge_vlm.vision.config import PATCH_MODELS, VisionConfig
from forge_vlm.vision.features import (
    Features,
    Grid,
    check_patches,
    checked_grids,
    grids_on_host,
    normalize_pixels,
    values_of,
)
from forge_vlm.vision.transformers import blocks_of, build_config, init_of, with_buffers

__all__ = ["PATCH_MODELS", "PatchEncoder", "num_layer_features"]


class PatchEncoder(nn.Module):
    """An encoder that takes `patches` (P, E) of all images one after the other, and `grids` (N, 3) int64 with the
    (time, rows, columns) in patches of each: `cut_patches` makes both.

    Patches of a frame see each other and none of another frame (packed by cu_seqlens). `merge` * `merge` of them become
    one token, so an image has time * rows * columns / merge^2, of the decoder's width; `Features.layers` are those of
    earlier blocks (DeepStack). Patches are uint8, or floats that are normalized already. Grids stay on the host, which
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
        """Features of patches (P, E), with the layers after; ValueError where the grids are not theirs."""
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
        return normalize_pixels(by_channel, *c.pixels, weight.dtype).flatten(1)

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
        """Tokens of one side of a square image."""
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


__getattr__ = renamed(__name__)
