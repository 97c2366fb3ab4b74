"""The weights of an encoder in a folder of transformers, by themselves or as a part of a larger model (CLIP, LLaVA)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forge_vlm._shared.problems import Problem, invalid
from forge_vlm.vision.config import VisionConfig

__all__ = ["encoder_differences", "encoder_tensors"]

#: Keys of vision configs that change nothing that an encoder computes: initial values, and a head that is not used.
_HARMLESS = ("initializer_factor", "initializer_range", "projection_dim")


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
