"""Encoders by the name in a config, and their weights in a folder of transformers (CLIP, or a part of LLaVA)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from forge_core.registry import Registry
from forge_vlm._shared.problems import Problem, invalid, raise_problems
from forge_vlm.vision.config import VisionConfig
from forge_vlm.vision.vit import PackedViT, ViT

__all__ = [
    "ENCODERS",
    "build_encoder",
    "check_encoder",
    "encoder_differences",
    "encoder_tensors",
    "find_encoder",
    "pixel_differences",
    "processor_pixels",
]


def _transformers(config: VisionConfig) -> nn.Module:
    if config.transformers["model_type"] == "mllama_vision_model":
        from forge_vlm.vision.mllama import MllamaEncoder

        return MllamaEncoder(config)
    from forge_vlm.vision.patches import PATCH_MODELS, PatchEncoder
    from forge_vlm.vision.transformers import TransformersEncoder

    patches = config.transformers["model_type"] in PATCH_MODELS
    return PatchEncoder(config) if patches else TransformersEncoder(config)


ENCODERS = Registry(
    "model.vision.name",
    "forge.vision_encoders",
    ("config",),
    {"vit": ViT, "packed_vit": PackedViT, "transformers": _transformers},
)


def build_encoder(config: VisionConfig) -> Any:
    """The encoder of a config, None for "none": a module with `width`, `extra_inputs`, `forward(**media) -> Features`
    and `dummy(device) -> media`; with `blocks()` FSDP2 gathers those one by one. ValueError for a name that leads nowhere
    and options that it does not take."""
    if config.name == "none":
        return None
    build = ENCODERS.checked(config.name, config.options)
    return build(config, **config.options)


def check_encoder(config: VisionConfig) -> None:
    """Raise what `build_encoder` would for the name, the options and, with transformers, the keys; nothing is built."""
    if config.name == "none":
        return
    ENCODERS.checked(config.name, config.options)
    if config.name == "transformers":
        from forge_vlm.vision.transformers import build_config

        build_config(config.transformers)


#: Keys of vision configs that change nothing that an encoder computes: initial values, and a head that is not used.
_HARMLESS = ("initializer_factor", "initializer_range", "projection_dim")


def find_encoder(
    config: VisionConfig,
    own: Mapping[str, Tensor],
    hf: Mapping[str, Any],
    processor: Mapping[str, Any],
    there: Mapping[str, Tensor],
) -> dict[str, str]:
    """`encoder_tensors` of a folder that has the encoder of `config` with the same keys, pixels and shapes.

    own, there: the tensors of the encoder and of the folder, of which only shapes are read. hf, processor: its
    `config.json` and the table of its image processor. ValueError with each difference: of a key (`vision.mean`), of a
    tensor by its name there, or of none.
    """
    raise_problems("", [*encoder_differences(config, hf), *pixel_differences(config, processor)])
    names = encoder_tensors(own, there)
    pairs = {
        theirs: (tuple(there[theirs].shape), tuple(own[n].shape)) for n, theirs in names.items()
    }
    fix = "build the model of this folder"
    wrong = [
        Problem(theirs, "shape", shape, f"must be {wanted}, as in the model", fix)
        for theirs, (shape, wanted) in pairs.items()
        if shape != wanted
    ]
    raise_problems("", wrong)
    return names


def encoder_tensors(own: Iterable[str], found: Iterable[str]) -> dict[str, str]:
    """{tensor of the encoder: tensor of the folder}, of names in transformers and names in its files.

        encoder_tensors(encoder.model.state_dict(), HFFolder("clip").entries)

    All of the encoder's stand in one place there, with the same words in front. ValueError with those that are missing in
    the place that has most.
    """
    names, there = list(own), set(found)
    fronts = {f.removesuffix(n) for n in names for f in there if f == n or f.endswith(f".{n}")}
    missing = {front: [n for n in names if front + n not in there] for front in fronts}
    if not missing:
        rule = f"has none of the encoder's tensors, such as {names[0]}"
        raise invalid("", "missing", ..., rule, "name its folder")
    front = min(missing, key=lambda f: (len(missing[f]), len(f), f))
    lost = missing[front]
    if lost:
        rule = f"lacks {', '.join(front + n for n in lost[:3])} ({len(lost)} of the encoder's {len(names)} tensors)"
        raise invalid("", "incomplete", ..., rule, "name a folder of the same model")
    return {name: front + name for name in names}


def processor_pixels(table: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """`mean` and `std` of a VisionConfig as an image processor of transformers has them; empty where it has none."""
    keys = {"mean": table.get("image_mean"), "std": table.get("image_std")}
    return {key: tuple(value) for key, value in keys.items() if isinstance(value, list)}


def pixel_differences(config: VisionConfig, processor: Mapping[str, Any]) -> list[Problem]:
    """Problems of the numbers by which an image processor normalizes 8-bit images otherwise."""
    own, fix = dict(zip(("mean", "std"), config.pixels)), "use it"
    rule = "is {} for the processor of the folder"
    return [
        Problem(f"vision.{key}", "processor", list(own[key]), rule.format(list(there)), fix)
        for key, there in processor_pixels(processor).items()
        if [round(v, 6) for v in there] != [round(v, 6) for v in own[key]]
    ]


def encoder_differences(config: VisionConfig, hf: Mapping[str, Any]) -> list[Problem]:
    """Problems of keys of `vision.transformers` that the folder's `config.json` has otherwise: with the same shapes it
    would compute something else. Keys that the encoder's config does not have (older files write dozens) say nothing, as in
    transformers. Nothing is built."""
    from transformers import PretrainedConfig

    from forge_vlm.vision.transformers import build_config

    kind = config.transformers["model_type"]
    given = {**hf.get("vision_config", hf)}
    given.setdefault("model_type", kind)
    if given["model_type"] != kind:
        rule = f"is {given['model_type']!r} there"
        return [Problem("vision.transformers.model_type", "differs", kind, rule, "use it")]

    here = build_config(config.transformers).to_dict()
    own = here.keys() - PretrainedConfig().to_dict().keys() - {*_HARMLESS}
    known = {key: value for key, value in given.items() if key in own}
    there = build_config({"model_type": kind, **known}).to_dict()
    return [
        Problem(
            f"vision.transformers.{key}", "differs", here[key], f"is {there[key]!r} there", "use it"
        )
        for key in sorted(own)
        if here[key] != there[key]
    ]
