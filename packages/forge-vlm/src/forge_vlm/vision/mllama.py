"""The encoder of Llama 3.2 Vision: an image as tiles of one size, which see each other.

Shapes: N images, C tiles of an image at most, P tokens of a tile, T = C P tokens of an image, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core import Init
from forge_core.model import reset_by_table
from forge_vlm._shared.problems import invalid
from forge_vlm.flops import ImageWork, Part, attended, image_work
from forge_vlm.vision.config import VisionConfig
from forge_vlm.vision.features import Features, normalize_pixels, values_of
from forge_vlm.vision.transformers import blocks_of, build_config, init_of, with_buffers

__all__ = ["MllamaEncoder"]


class MllamaEncoder(nn.Module):
    """`MllamaVisionModel` of transformers, whose names its weights have below `model`.

    `images` are (N, C, 3, H, W), zeros where an image has fewer than C = `max_num_tiles` tiles; `aspect_ratio_ids` (N,)
    count from 1 in `supported_aspect_ratios`, of which the first number times the second is how many tiles there are. The
    features of tiles that are none are not `valid`. Raises ValueError for options of other encoders.
    """

    extra_inputs = ("images", "aspect_ratio_ids")

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        if config.select_layer or config.select_feature != "cls_patch":
            value = (config.select_layer, config.select_feature)
            rule = "(and select_feature) must be left out for 'mllama_vision_model'"
            fix = "use transformers.intermediate_layers_indices"
            raise invalid("vision.select_layer", "foreign", value, rule, fix)

        from transformers import MllamaVisionModel

        self.config, own = config, build_config(config.transformers)
        self.model, self._buffers_at_start = with_buffers(lambda: MllamaVisionModel(own))
        self.width = own.hidden_size * (1 + len(own.intermediate_layers_indices))
        if self.width != own.vision_output_dim:
            rule = (
                f"must be {self.width}, hidden_size times one more than intermediate_layers_indices"
            )
            raise invalid(
                "vision.transformers.vision_output_dim",
                "mismatch",
                own.vision_output_dim,
                rule,
                "correct it",
            )

        self.num_tiles, self.image_size = own.max_num_tiles, own.image_size
        self.tiles_of = (0, *(rows * columns for rows, columns in own.supported_aspect_ratios))

    def forward(self, images: Any, aspect_ratio_ids: Any) -> Features:
        """Features (N, T, W) of images (N, C, 3, H, W), or of the entries of ragged extras."""
        c, pixels, ratios = self.config, values_of(images), values_of(aspect_ratio_ids)
        weight = self.model.patch_embedding.weight
        own = normalize_pixels(pixels.flatten(0, 1), *c.pixels, weight.dtype).view(pixels.shape)
        tiles = torch.tensor(self.tiles_of).to(pixels.device, non_blocking=True)[ratios]  # (N,)
        there = torch.arange(self.num_tiles, device=pixels.device) < tiles[:, None]  # (N, C)
        out = self.model(
            pixel_values=own.unsqueeze(1),
            aspect_ratio_ids=ratios[:, None],
            aspect_ratio_mask=there[:, None].long(),
        ).last_hidden_state[:, 0]  # (N, C, P, W)
        valid = there[..., None].expand(out.shape[:3]).flatten(1)
        return Features(out.flatten(1, 2), valid=valid)

    def blocks(self) -> list[nn.Module]:
        """In order of depth."""
        return blocks_of(self.model)

    def image_work(self, pixels: int | None = None) -> ImageWork:
        """One image of all its tiles, of which each is filled up to a multiple of eight tokens."""
        own = self.model.config
        patches = (self.image_size // own.patch_size) ** 2
        tokens, blocks = self.num_tiles * (patches + 1), self.blocks()
        filled = self.num_tiles * -(-(patches + 1) // 8) * 8
        parts: list[Part] = [(block, filled) for block in blocks]
        parts.append((self.model.patch_embedding, self.num_tiles * patches))
        scores = len(blocks) * attended(filled, filled, own.hidden_size)
        return image_work(tokens, 0, 0, parts, scores)

    def dummy(self, device: Any) -> dict[str, Tensor]:
        """Media of one image, for a batch without any."""
        shape = (1, self.num_tiles, 3, self.image_size, self.image_size)
        images = self.model.patch_embedding.weight.new_zeros(shape, device=device)
        ratios = torch.ones(1, dtype=torch.int64, device=device)
        return {"images": images, "aspect_ratio_ids": ratios}

    def reset_parameters(self) -> None:
        """Draw initial values as `init_table` has them, also after `to_empty`."""
        reset_by_table(self)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Weights are normal, scales of norms one, biases zero; gates are closed, or as in transformers."""
        table = {f"model.{n}": _init(n, p, std) for n, p in self.model.named_parameters()}
        return table | {f"model.{n}": Init("values", b) for n, b in self._buffers_at_start.items()}


def _init(name: str, parameter: Tensor, std: float) -> Init:
    if name.endswith(".gate"):
        return Init("constant", 0.0)
    return init_of(name, parameter, std)
