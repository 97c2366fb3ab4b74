"""Checks of the options of a source of conversations with pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from forge_vlm._config import is_finite, is_size
from forge_vlm.data.formats import FORMATS
from forge_vlm.data.sample import WEIGHTS
from forge_vlm.data.sampling import VideoConfig, score_of
from forge_vlm.data.templates import TEMPLATES
from forge_vlm.plan import POSITIONS, SCOPES
from forge_vlm.resolution import ResolutionConfig

__all__ = ["problems", "resolution_of", "video_of_options"]

CORRUPT = ("raise", "skip", "mask")
TOO_LONG = ("raise", "skip")
_CHOICES: dict[str, tuple[str, ...]] = {
    "format": tuple(FORMATS),
    "template": (*TEMPLATES, "tokenizer"),
    "weigh": WEIGHTS,
    "positions": POSITIONS,
    "bidirectional": ("none", *SCOPES),
    "corrupt": CORRUPT,
    "too_long": TOO_LONG,
}
_PATCHES = {"patch_size": 16, "merge": 2, "patch_time": 2}
_MOST = 2**16


def resolution_of(given: Mapping[str, Any]) -> ResolutionConfig:
    """The configuration of nested keys; ValueError for keys that it does not have.

    Usage: `resolution_of({"name": "tiles", "tiles": {"tile_size": 384}})`.
    """
    found = dict(_known(ResolutionConfig, given, "resolution"))
    for key, value in found.items():
        if isinstance(value, Mapping):
            kind: Any = type(getattr(ResolutionConfig(), key))
            found[key] = kind(**_known(kind, value, f"resolution.{key}"))
    return ResolutionConfig(**found)


def video_of_options(given: Mapping[str, Any]) -> VideoConfig:
    """Which frames of a video are taken; ValueError for keys that there are not."""
    return VideoConfig(**_known(VideoConfig, given, "video"))


def _known(kind: type[Any], given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    known = [f.name for f in fields(kind)]
    for key in given:
        if key not in known:
            raise ValueError(f"{where}.{key} must be one of {', '.join(known)}; correct the key")
    return given


def problems(options: Mapping[str, Any]) -> Iterator[str]:
    """Sentences for options of `Conversations` that cannot be."""
    for key, known in _CHOICES.items():
        if options[key] not in known:
            yield f"{key} {options[key]!r:.40} must be one of {', '.join(known)}; use {known[0]!r}"
    try:
        resolution = resolution_of(options["resolution"] or {})
        score_of(video_of_options(options["video"] or {}).score)
    except ValueError as error:
        yield str(error)
        return
    yield from _token_problems(options, resolution)
    if options.get("image_masks") and resolution.name == "budget":
        yield "image_masks True must be False when resolution.name is 'budget', whose patches have none; remove it"
    yield from _group_problems(options)
    mean = options["mean"]
    if len(mean) != 3 or not all(is_finite(v) and 0 <= v <= 1 for v in mean):
        yield f"mean {list(mean)} must be three numbers from 0 to 1; give that of the encoder"


def _group_problems(options: Mapping[str, Any]) -> Iterator[str]:
    group = options.get("group")
    if group is not None and not is_size(group, _MOST):
        yield f"group {group!r:.40} must be a whole number from 1 to {_MOST}; give train.global_batch"
    elif group is not None and options["pack"]:
        yield f"group {group} needs rows of one sample each, and pack is True; set pack = false, or remove group"


def _token_problems(options: Mapping[str, Any], resolution: ResolutionConfig) -> Iterator[str]:
    each = options["tokens_per_tile"]
    for key, default in _PATCHES.items():
        if not is_size(options[key], _MOST):
            yield f"{key} {options[key]!r:.40} must be a whole number from 1 to {_MOST}; use {default}"
        elif resolution.name != "budget" and options[key] != default:
            yield f"{key} {options[key]} is a key of resolution.name 'budget', and name is {resolution.name!r}; remove it"
    if resolution.name != "budget" and not is_size(each, _MOST):
        yield f"tokens_per_tile {each!r:.40} must be a whole number from 1 to {_MOST}; give that of the model's adapter"
    elif resolution.name == "budget" and each is not None:
        yield f"tokens_per_tile {each} means nothing when resolution.name is 'budget', where sizes say it; remove it"
    elif resolution.name == "budget" and all(is_size(options[key], _MOST) for key in _PATCHES):
        side = options["patch_size"] * options["merge"]
        if resolution.budget.multiple % side:
            yield f"resolution.budget.multiple {resolution.budget.multiple} must be one of patch_size * merge, {side}; use {side}"
    elif options["positions"] == "mrope" and int(each**0.5) ** 2 != each:
        yield f"tokens_per_tile {each} must be a square with positions 'mrope', whose tokens have rows and columns; change one"
