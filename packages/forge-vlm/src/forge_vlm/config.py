"""Configuration of a vision-language model: a decoder's, with an encoder, an adapter and a fusion.

A choice by name has a table of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from forge_core import TransformerConfig
from forge_core.model import MRopeConfig
from forge_vlm._config import foreign_table, is_size
from forge_vlm._shared.fields import field
from forge_vlm._shared.problems import Problem, raise_problems
from forge_vlm.adapters import AdapterConfig
from forge_vlm.fusion.config import (
    CrossAttentionConfig,
    MixtureOfTransformersConfig,
    MoMaConfig,
    fusion_problems,
)
from forge_vlm.modalities import ModalityConfig
from forge_vlm.sequence.plan import SCOPES, SPAN_INPUTS
from forge_vlm.vision.config import VisionConfig

__all__ = ["FusionConfig", "VLMConfig"]

FUSIONS = ("joint_decoder", "cross_attention", "mixture_of_transformers", "moma")
#: Names of what the papers of these fusions also try, and why they are not built here.
REFUSED = {
    "diffusion": "heads that draw images by diffusion are not built; use discrete image tokens",
    "transfusion": "heads that draw images by diffusion are not built; use discrete image tokens",
    "mixture_of_depths": "skipped layers choose among later tokens too, and MoMa's authors advise against them; use moma",
}


@dataclass(frozen=True)
class FusionConfig:
    """How the decoder sees images, by name: joint_decoder (features are tokens of the stream, LLaVA), cross_attention
    (blocks between those of the text read them; Flamingo, Llama 3.2 Vision), mixture_of_transformers (weights of each
    modality around one attention), moma (experts of each modality)."""

    name: str = "joint_decoder"
    """how the decoder sees images: joint_decoder, cross_attention, mixture_of_transformers, moma"""
    mixture_of_transformers: MixtureOfTransformersConfig = field(MixtureOfTransformersConfig)
    """the fusion mixture_of_transformers"""
    moma: MoMaConfig = field(MoMaConfig)
    """the fusion moma"""
    cross_attention: CrossAttentionConfig = field(CrossAttentionConfig)
    """the fusion cross_attention"""

    def __post_init__(self) -> None:
        raise_problems("fusion", _fusion_problems(self))


def _fusion_problems(c: FusionConfig) -> Iterator[Problem]:
    if c.name in REFUSED:
        yield Problem("name", "unsupported", c.name, f"is not supported: {REFUSED[c.name]}")
    elif c.name not in FUSIONS:
        yield Problem("name", "unknown", c.name, f"must be one of {', '.join(FUSIONS)}", "use one")
    for table in ("cross_attention", "mixture_of_transformers", "moma"):
        yield from foreign_table(c, table, table)


@dataclass(frozen=True)
class VLMConfig(TransformerConfig):
    """A decoder with eyes: all keys of `TransformerConfig`, and what the images need.

    VLMConfig(vocab_size=256, modalities={"image": ModalityConfig(first_id=255)})
    """

    vision: VisionConfig = field(VisionConfig)
    """the encoder"""
    adapter: AdapterConfig = field(AdapterConfig)
    """from the encoder's features to the stream"""
    fusion: FusionConfig = field(FusionConfig)
    """how the decoder sees images"""
    modalities: dict[str, ModalityConfig] = dataclasses.field(default_factory=dict, hash=False)
    """token ids that stand for images or other media, by name"""
    mrope: MRopeConfig | None = None  # type: ignore[misc]
    """how positions of three axes turn heads; empty: they have one"""
    input_only_ids: int = 0
    """ids from vocab_size on that are embedded and never predicted (Llama 3.2 Vision: 8)"""
    images_per_row: int = 1
    """images of a sequence, as plans and FLOPs (MFU) count them; rows may have any number"""
    pixels_per_image: int | None = field(None, range="a whole number from 1 to 268435456")
    """their size in pixels, as it is counted, where the encoder takes any; empty: 512 * 512, of packed_vit image_size *
    image_size"""
    positions: Literal["sequential", "text_preserving", "mrope"] = "sequential"
    """positions of an image's tokens: sequential, text_preserving, or mrope"""
    bidirectional: Literal["none", "image", "clip", "document", "prefix_lm"] = "none"
    """which tokens see those after them too: none; those of an image, of a clip, of all images of a document; or
    prefix_lm, all before the first answer"""

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_problems("model", _problems(self))

    @property
    def span_input(self) -> str | None:
        """The keyword of forward that numbers the tokens which see each other also ahead, such as "image_ids"; None where
        none do. `SequencePlan.spans` makes it."""
        return SPAN_INPUTS.get(self.bidirectional)

    @property
    def placeholders(self) -> dict[str, ModalityConfig]:
        """The modalities whose tokens are replaced by features."""
        return {name: m for name, m in self.modalities.items() if not m.discrete}

    @property
    def discrete(self) -> dict[str, ModalityConfig]:
        """The modalities whose tokens are embedded and trained like text."""
        return {name: m for name, m in self.modalities.items() if m.discrete}


def _mask_problems(c: VLMConfig) -> Iterator[Problem]:
    name = c.bidirectional
    if name not in ("none", *SCOPES):
        rule = f"must be one of none, {', '.join(SCOPES)}"
        yield Problem("bidirectional", "unknown", name, rule, "use 'none'")

    if name == "none":
        return
    if c.fusion.name == "cross_attention":
        rule = "must be 'none' with fusion.name 'cross_attention', whose images are not tokens of the stream"
        yield Problem("bidirectional", "cross_attention", name, rule, "leave it out")

    for other in c.discrete:
        rule = f"must be 'none' with modalities.{other}, whose discrete tokens are predicted from the tokens before them"
        yield Problem("bidirectional", "discrete", name, rule, "leave it out")
    if c.mixer not in ("attention", "mla"):
        rule = f"is computed by mixer 'attention' and 'mla', and mixer is {c.mixer!r}"
        yield Problem("bidirectional", "mixer", name, rule, "use one")

    if c.attention.mask != "causal":
        rule = (
            f"excludes attention.mask {c.attention.mask!r}: both define which tokens see each other"
        )
        yield Problem("bidirectional", "excludes", name, rule, "leave one out")


def _no_encoder_problems(c: VLMConfig) -> Iterator[Problem]:
    for name in c.placeholders:
        rule = "stands for features, and vision.name is 'none'"
        fix = "name an encoder, or set discrete = true"
        yield Problem(f"modalities.{name}", "requires", ..., rule, fix)
    if not c.modalities:
        rule = "must name the discrete tokens of images without an encoder"
        fix = "write [model.modalities.image] first_id, num_ids and discrete = true"
        yield Problem("modalities", "no_discrete", c.modalities, rule, fix)
    if c.adapter != AdapterConfig():
        rule = "has no features to adapt with vision.name 'none'"
        yield Problem("adapter.name", "requires", c.adapter.name, rule, "remove [model.adapter]")
    if c.fusion.name == "cross_attention":
        rule = "must have an encoder, and vision.name is 'none'"
        yield Problem("fusion.name", "requires", c.fusion.name, rule, "use joint_decoder")


def _any_size_problems(c: VLMConfig) -> Iterator[Problem]:
    name = c.adapter.name
    if name not in ("none", "linear", "mlp") and ":" not in name:
        rule = (
            "must be none, linear, mlp or module:attr with an encoder of images of any sizes, whose tokens do not form a grid "
            "of one size"
        )
        yield Problem("adapter.name", "any_size", name, rule, "use mlp")
    if c.fusion.name == "cross_attention":
        rule = "must have images of one size, and this encoder packs images of any sizes"
        yield Problem("fusion.name", "any_size", c.fusion.name, rule, "use joint_decoder")


def _pixel_problems(c: VLMConfig) -> Iterator[Problem]:
    if not c.vision.any_size:
        kind = c.vision.transformers.get("model_type", c.vision.name)
        rule = f"is not read with the encoder {kind!r}, whose images have one size"
        yield Problem("pixels_per_image", "foreign", c.pixels_per_image, rule, "remove it")
    elif not is_size(c.pixels_per_image, 2**28):
        value = c.pixels_per_image
        yield Problem("pixels_per_image", "size", value, "must be a whole number", "use 262144")


def _problems(c: VLMConfig) -> Iterator[Problem]:
    if c.vision.name == "none":
        yield from _no_encoder_problems(c)
    elif not c.placeholders:
        rule = "must name the placeholder of images"
        fix = "write [model.modalities.image] first_id = its id"
        yield Problem("modalities", "no_placeholder", c.modalities, rule, fix)

    ends = sorted((m.first_id, m.first_id + m.num_ids, name) for name, m in c.modalities.items())
    for name, m in c.modalities.items():
        if not m.discrete and m.first_id == 0:
            rule = "must be above 0, as rows are padded with 0 and padding is not an image"
            fix = "give the placeholder another id"
            yield Problem(f"modalities.{name}.first_id", "padding", 0, rule, fix)
        most = c.vocab_size + (0 if m.discrete else c.input_only_ids)
        if m.first_id + m.num_ids > most:
            rule = f"must be below vocab_size {most} with all of its {m.num_ids} ids"
            value = m.first_id
            yield Problem(f"modalities.{name}.first_id", "range", value, rule, "raise vocab_size")

    for (_, stop, one), (start, _, other) in itertools.pairwise(ends):
        if start < stop:
            rule = f"must not share ids with modalities.{other}"
            yield Problem(f"modalities.{one}", "duplicate", ..., rule, "move one")

    if not (c.images_per_row == 0 or is_size(c.images_per_row, 2**16)):
        rule = "must be a whole number, 0 or more"
        yield Problem("images_per_row", "range", c.images_per_row, rule, "use 1")
    if c.vision.any_size:
        yield from _any_size_problems(c)

    if c.pixels_per_image is not None:
        yield from _pixel_problems(c)
    if not (c.input_only_ids == 0 or is_size(c.input_only_ids, 2**20)):
        rule = "must be a whole number, 0 or more"
        yield Problem("input_only_ids", "range", c.input_only_ids, rule, "leave it out")
    elif c.input_only_ids and c.tie_embeddings:
        rule = "must be 0 with tie_embeddings, where every id that is embedded is predicted"
        yield Problem("input_only_ids", "excludes", c.input_only_ids, rule, "untie them")

    if c.fusion.name == "cross_attention":
        yield from c.fusion.cross_attention.problems(c.num_layers)
        if c.positions != "sequential":
            rule = "must be 'sequential' with fusion.name 'cross_attention', whose images are not tokens of the stream"
            yield Problem("positions", "cross_attention", c.positions, rule, "leave it out")

    if c.positions not in ("sequential", "text_preserving", "mrope"):
        rule = "must be 'sequential', 'text_preserving' or 'mrope'"
        yield Problem("positions", "unknown", c.positions, rule, "use 'sequential'")
    if (c.positions == "mrope") != (c.mrope is not None):
        rule = f"must go with mrope {c.mrope}: positions of three axes are for a decoder with [model.mrope]"
        yield Problem("positions", "mrope", c.positions, rule, "set both, or neither")

    if c.mrope is not None:
        yield from (Problem(**vars(p)) for p in c.mrope.problems(c.rotary_dim, c.mixer))
    yield from _mask_problems(c)
    yield from fusion_problems(c)
    if c.mtp.num_modules:
        rule = "must be 0 with images, whose tokens have no embedding ahead"
        yield Problem("mtp.num_modules", "excludes", c.mtp.num_modules, rule, "leave it out")
