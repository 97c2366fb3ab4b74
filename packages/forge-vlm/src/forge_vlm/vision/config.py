"""Configuration of vision encoders, validated when made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from forge_vlm._config import foreign_table, is_finite, size_problems
from forge_vlm._shared.problems import Problem, raise_problems

__all__ = ["PATCH_MODELS", "ViTConfig", "VisionConfig"]

#: Encoders of transformers that take images of any sizes, as patches.
PATCH_MODELS = ("qwen3_vl_vision", "qwen3_vl_moe_vision")
NAMES = ("vit", "packed_vit", "transformers", "none")
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
#: Mean and deviation of the pixels that the published encoders were trained on, by model_type.
_TRAINED_ON = {
    "clip_vision_model": _CLIP,
    "mllama_vision_model": _CLIP,
    "pixtral": _CLIP,
    "aimv2_vision_model": _CLIP,
    "siglip_vision_model": _HALF,
    "siglip2_vision_model": _HALF,
    "idefics3_vision": _HALF,
    "smolvlm_vision": _HALF,
    "qwen3_vl_vision": _HALF,
    "qwen3_vl_moe_vision": _HALF,
    "vit": _HALF,
    "internvl_vision": _IMAGENET,
    "dinov2": _IMAGENET,
    "dinov2_with_registers": _IMAGENET,
    "dinov3_vit": _IMAGENET,
}


@dataclass(frozen=True)
class ViTConfig:
    """A plain vision transformer: `ViTConfig(image_size=32, patch_size=8, dim=64)`."""

    image_size: int = 32
    """height and width of an image, in pixels; of packed_vit, which takes any, the one whose patches have positions
    of their own"""
    patch_size: int = 8
    """height and width of a patch, in pixels"""
    dim: int = 64
    """width of its stream"""
    num_layers: int = 2
    """number of blocks"""
    num_heads: int = 4
    """heads of each attention"""
    hidden_dim: int | None = None
    """width inside the feed-forward; empty: 4 dim"""
    merge: int = 1
    """rows and columns of patches that become one token of packed_vit"""

    def __post_init__(self) -> None:
        raise_problems("vit", _vit_problems(self))

    @property
    def side(self) -> int:
        """Patches in a row, and in a column."""
        return self.image_size // self.patch_size


def _vit_problems(c: ViTConfig) -> Iterator[Problem]:
    sizes = {"image_size": 2**14, "patch_size": 2**14, "dim": 2**16, "num_layers": 2**10}
    wrong = list(size_problems(c, {**sizes, "num_heads": 2**10, "hidden_dim": 2**20, "merge": 64}))
    yield from wrong
    if not wrong and c.image_size % c.patch_size:
        rule = f"must divide image_size {c.image_size}"
        yield Problem("patch_size", "divides", c.patch_size, rule, "change one")
    if not wrong and c.dim % c.num_heads:
        yield Problem("num_heads", "divides", c.num_heads, f"must divide dim {c.dim}", "change one")


@dataclass(frozen=True)
class VisionConfig:
    """A vision encoder by name: "vit", "packed_vit" (the same on images of any sizes), "transformers" (any vision model of
    its AutoModel), or `module:attr`; or "none", for images that are discrete tokens.

        VisionConfig("transformers", transformers={"model_type": "siglip_vision_model"})

    Features are those of the hidden states `select_layer` (0: embeddings, -1: after the last block), side by side,
    or without it what the encoder gives at its end. "patch" leaves a class token and registers out.
    """

    name: str = "vit"
    """vit, packed_vit (images of any sizes), transformers, the import path of an encoder, or none where images are
    discrete tokens"""
    vit: ViTConfig = ViTConfig()
    """sizes of the encoders vit and packed_vit"""
    transformers: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """vision_config of transformers: model_type and its keys"""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """keyword arguments of an encoder by import path"""
    select_layer: tuple[int, ...] = ()
    """hidden states that are the features, side by side; empty: the encoder's last"""
    select_feature: Literal["patch", "cls_patch"] = "cls_patch"
    """patch leaves out a class token and registers in front; cls_patch takes all tokens"""
    mean: tuple[float, ...] = ()
    """subtracted from each channel of 8-bit images, divided by 255 before; empty: what model_type was trained
    with"""
    std: tuple[float, ...] = ()
    """each channel of 8-bit images is divided by; empty: what model_type was trained with"""

    def __post_init__(self) -> None:
        raise_problems("vision", _vision_problems(self))

    @property
    def any_size(self) -> bool:
        """Whether it takes images of any sizes, as `patches` and `grids`."""
        kind = self.transformers.get("model_type")
        return self.name == "packed_vit" or kind in PATCH_MODELS

    @property
    def pixels(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of 8-bit images: those given, else what the kind of encoder was trained with."""
        known = _TRAINED_ON.get(str(self.transformers.get("model_type")), _HALF)
        return self.mean or known[0], self.std or known[1]


def _vision_problems(c: VisionConfig) -> Iterator[Problem]:
    if c.name not in NAMES and ":" not in c.name:
        rule = f"must be {', '.join(NAMES)} or module:attr"
        yield Problem("name", "unknown", c.name, rule, "use vit")
    if c.name != "packed_vit":
        yield from foreign_table(c, "vit", "vit")

    if c.name == "vit" and c.vit.merge != 1:
        rule = "is a key of name 'packed_vit', and name is 'vit'"
        yield Problem("vit.merge", "foreign", c.vit.merge, rule, "remove one")
    if c.transformers and c.name != "transformers":
        rule = f"is the table of name 'transformers', and name is {c.name!r}"
        yield Problem("transformers", "foreign", ..., rule, "remove it")

    if c.name == "transformers" and not isinstance(c.transformers.get("model_type"), str):
        rule, fix = "must name a vision model", "use 'clip_vision_model' or 'siglip_vision_model'"
        yield Problem(
            "transformers.model_type", "type", c.transformers.get("model_type"), rule, fix
        )

    if c.name == "none":
        yield from _keys_of_no_encoder(c)
    if c.options and ":" not in c.name:
        rule = f"are those of an encoder by import path, and name is {c.name!r}"
        yield Problem("options", "foreign", ..., rule, "remove them")

    if any(isinstance(i, bool) or not isinstance(i, int) for i in c.select_layer):
        yield Problem("select_layer", "type", c.select_layer, "must be whole numbers", "use [-2]")
    if c.select_feature not in ("patch", "cls_patch"):
        rule = "must be 'patch' or 'cls_patch'"
        yield Problem("select_feature", "unknown", c.select_feature, rule, "use 'cls_patch'")

    for key in ("mean", "std"):
        value = getattr(c, key)
        kind = c.transformers.get("model_type")
        if not value and kind and kind not in _TRAINED_ON:
            fix = f"give image_{key} of its preprocessor_config.json"
            yield Problem(key, "missing", ..., f"of a {kind!r} is not known here", fix)
        elif value and (
            len(value) != 3 or not all(is_finite(v) and (key == "mean" or v > 0) for v in value)
        ):
            rule = f"must be three finite numbers{', above 0' if key == 'std' else ''}"
            yield Problem(key, "range", value, rule, "use 0.5")


def _keys_of_no_encoder(c: VisionConfig) -> Iterator[Problem]:
    for key in ("select_layer", "select_feature", "mean", "std"):
        if getattr(c, key) != getattr(VisionConfig, key):
            rule = "is not read by name 'none', which has no encoder"
            yield Problem(key, "no_encoder", getattr(c, key), rule, "remove it")
