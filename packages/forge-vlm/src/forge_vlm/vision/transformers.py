"""Vision encoders of transformers, as `AutoModel` builds them from a config.

Shapes: N images, T tokens of an image, W width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forge_core import Init
from forge_core.model import reset_by_table
from forge_vlm._shared.problems import invalid
from forge_vlm.flops import ImageWork, Part, attended, image_work
from forge_vlm.vision.config import VisionConfig
from forge_vlm.vision.features import Features, check_size, normalize_pixels, select, values_of

__all__ = ["TransformersEncoder"]

#: Names of the lists in which its models have their blocks.
_BLOCKS = ("blocks", "layer", "layers")
#: Tokens before the patches of encoders that most folders have, which need not be built to be asked.
_KNOWN_FRONT = {"clip_vision_model": 1, "siglip_vision_model": 0}
#: Encoders that add as many positions as there are patches, wherever these are.
_ONE_SIZE = ("siglip_vision_model", "aimv2_vision_model")
#: Keys of their configs for the value that weights of a full block begin with.
_LAYER_SCALES = ("layer_scale_init_value", "layerscale_value")


class TransformersEncoder(nn.Module):
    """A vision model that takes `pixel_values` (N, 3, H, W) of one size: CLIP, SigLIP, Idefics3, InternVL, ...

    Its weights have the names that they have in transformers, below `model`. A model with masks of patches (Idefics3,
    SmolVLM) may also take `image_masks` (N, H, W), not 0 where a pixel is no padding: tiles of one size need none.
    Raises ValueError for keys that its config does not have, for models of other inputs (SigLIP 2 NaFlex), and where
    transformers is not installed.
    """

    extra_inputs = ("images",)

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        own = build_config(config.transformers)
        if not hasattr(own, "image_size"):
            rule = "has no image_size, and only encoders of images of one size are computed"
            fix = "use 'siglip_vision_model', or name = 'packed_vit'"
            value = config.transformers["model_type"]
            raise invalid("vision.transformers.model_type", "no_image_size", value, rule, fix)
        self.model: Any
        self.model, self._buffers_at_start = _build_model(own)
        if hasattr(self.model, "use_head"):
            self.model.use_head = False  # SigLIP's pooled output is no feature; its weights stay
        self.width = own.hidden_size * max(1, len(config.select_layer))
        self.image_size, self.patch_size = _side(own.image_size), _side(own.patch_size)
        #: Tokens before the patches: a class token and registers.
        self.front = _front_of(self.model)
        masked = "patch_attention_mask" in inspect.signature(self.model.forward).parameters
        self.optional_inputs = ("image_masks",) if masked else ()

    def forward(self, images: Any, image_masks: Any = None) -> Features:
        """Features of images (N, 3, H, W), or of the entries of a ragged extra; masks only where it takes them."""
        c, weight = self.config, next(self.model.parameters())
        given = values_of(images)
        if self.model.config.model_type in _ONE_SIZE:
            check_size(given, self.image_size)
        pixels = normalize_pixels(given, *c.pixels, weight.dtype)
        masks = {} if image_masks is None else self._patch_masks(values_of(image_masks))
        out = self.model(pixel_values=pixels, output_hidden_states=bool(c.select_layer), **masks)
        states = out.hidden_states if c.select_layer else ()
        tokens = select(states, out.last_hidden_state, c, front=self.front)  # (N, T, W)
        if len(tokens) != len(pixels):  # Pixtral packs them one after the other
            tokens = tokens.unflatten(1, (len(pixels), -1))[0]
        if self.front and c.select_feature == "cls_patch":
            return Features(tokens)
        rows, columns = (side // self.patch_size for side in pixels.shape[2:])
        return Features(tokens, rows, columns)

    def _patch_masks(self, masks: Tensor) -> dict[str, Tensor]:
        """A patch is seen where any of its pixels is: (N, H, W) -> (N, rows, columns)."""
        size = self.patch_size
        rows, columns = (side // size for side in masks.shape[1:])
        cut = (masks != 0)[:, : rows * size, : columns * size].unflatten(2, (columns, size))
        seen = cut.unflatten(1, (rows, size)).any(4).any(2)  # (N, rows, columns)
        return {"patch_attention_mask": seen}

    def reset_parameters(self) -> None:
        """Draw initial values as `init_table` has them, also after `to_empty`."""
        reset_by_table(self)

    def init_table(self, std: float, residual_std: float) -> dict[str, Init]:
        """Weights are normal, scales of norms one, those of blocks what the config says, biases zero; buffers have what
        transformers gives them."""
        own = self.model.config
        table = {f"model.{n}": init_of(n, p, std, own) for n, p in self.model.named_parameters()}
        return table | {f"model.{n}": Init("values", b) for n, b in self._buffers_at_start.items()}

    def blocks(self) -> list[nn.Module]:
        """In order of depth."""
        return blocks_of(self.model)

    def image_work(self, pixels: int | None = None) -> ImageWork:
        """One image: its patches, with a class token and registers, through the blocks."""
        own, side = self.model.config, self.image_size // self.patch_size
        tokens = side * side
        blocks = self.blocks()
        parts: list[Part] = [(block, tokens + self.front) for block in blocks]
        parts += [(m, tokens) for m in self.model.modules() if isinstance(m, nn.Conv2d)]
        scores = len(blocks) * attended(tokens + self.front, tokens + self.front, own.hidden_size)
        if self.front and self.config.select_feature == "cls_patch":
            return image_work(tokens + self.front, 0, 0, parts, scores)
        return image_work(tokens, side, side, parts, scores)

    def dummy(self, device: Any) -> dict[str, Tensor]:
        """Media of one image, for a batch without any."""
        return self.media_of(1, None, device)

    def media_of(self, images: int, pixels: int | None, device: Any) -> dict[str, Tensor]:
        """Media of so many black images."""
        side = self.image_size
        return {"images": torch.zeros(images, 3, side, side, device=device)}


def build_config(keys: dict[str, Any]) -> Any:
    """The config of transformers with these keys; ValueError for an unknown model_type or key."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        fix = "install 'forge-vlm[transformers]'"
        rule = "needs transformers"
        raise invalid("vision.name", "requires", "transformers", rule, fix) from error

    options = {key: value for key, value in keys.items() if key != "model_type"}
    if keys["model_type"] not in CONFIG_MAPPING:
        rule, fix = "is unknown to transformers", "use 'clip_vision_model' or 'siglip_vision_model'"
        raise invalid("vision.transformers.model_type", "unknown", keys["model_type"], rule, fix)

    kind = CONFIG_MAPPING[keys["model_type"]]
    plain = kind()
    unknown = [key for key in options if not hasattr(plain, key)]
    if unknown:
        rule = f"is not a key of {kind.__name__}"
        fix = "correct or remove it"
        raise invalid(
            f"vision.transformers.{unknown[0]}", "unknown_key", options[unknown[0]], rule, fix
        )

    return kind(**options)


def front_tokens(keys: dict[str, Any]) -> int:
    """How many tokens an encoder with these keys has before the patches: a class token and registers."""
    if keys["model_type"] in _KNOWN_FRONT:
        return _KNOWN_FRONT[keys["model_type"]]
    from transformers import AutoModel

    with torch.device("meta"):
        return _front_of(AutoModel.from_config(build_config(keys)))


def _front_of(model: Any) -> int:
    names = [name for name, _ in model.named_parameters()]
    # not that of a head which pools (AIMv2)
    ends = ("embeddings.class_embedding", "embeddings.cls_token")
    has_class_token = any(name.endswith(ends) for name in names)
    return has_class_token + int(getattr(model.config, "num_register_tokens", 0))


def _build_model(config: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import AutoModel

    return with_buffers(lambda: AutoModel.from_config(config))


class _Values(dict[str, Tensor]):
    """Tensors that copies of a module share: a planner copies models without values."""

    def __deepcopy__(self, memo: Any) -> _Values:
        return self


def with_buffers(build: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """A model on the default device, and its buffers: on the meta device they would have no values.

    A parameter without elements (register tokens of a model that has none) becomes a buffer of its name: FSDP2 cannot
    reduce its gradient.
    """
    device = torch.get_default_device()
    with torch.device("cpu"):
        model: nn.Module = build()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.numel():
                delattr(module, name)
                module.register_buffer(name, parameter.detach())
    buffers = _Values({name: buffer.clone() for name, buffer in model.named_buffers()})
    return model.to(device), buffers


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules in lists that transformers names as lists of blocks, in order."""
    lists = [m for name, m in model.named_modules() if name.rpartition(".")[2] in _BLOCKS]
    return [block for found in lists if isinstance(found, nn.ModuleList) for block in found]


def init_of(name: str, parameter: Tensor, std: float, config: Any = None) -> Init:
    """How a parameter of this name begins, in a model of this config of transformers."""
    if name.endswith("bias"):
        return Init("constant", 0.0)
    if name.rpartition(".")[2].startswith("lambda"):  # what a block adds begins small (CaiT)
        values = (getattr(config, key, None) for key in _LAYER_SCALES)
        return Init("constant", float(next((v for v in values if v is not None), 1.0)))
    scales = parameter.dim() == 1 and name.endswith("weight")
    return Init("constant", 1.0) if scales else Init("normal", std)


def _side(size: Any) -> int:
    return int(size if isinstance(size, int) else size[0])
