"""Checks of the options of a source of conversations with images, only and against a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from forge_vlm._config import is_finite, is_size
from forge_vlm._shared.problems import Problem, ProblemError, invalid, problems_of
from forge_vlm._shared.record_keys import option_problems
from forge_vlm.data.formats import FORMATS
from forge_vlm.data.templates import TEMPLATES
from forge_vlm.data.video import VideoConfig, score_of
from forge_vlm.resolution import ResolutionConfig
from forge_vlm.sequence.plan import POSITIONS, SCOPES

__all__ = ["WEIGHTS", "fit_problems", "problems", "resolution_of", "video_of_options"]

WEIGHTS = ("token", "sample", "sqrt", "message")
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
C = TypeVar("C", bound=Any)


def resolution_of(given: Mapping[str, Any]) -> ResolutionConfig:
    """The configuration of nested keys; ValueError for keys that it does not have.

    Usage: `resolution_of({"name": "tiles", "tiles": {"tile_size": 384}})`.
    """
    found = dict(given)
    for key, value in found.items():
        if isinstance(value, Mapping) and hasattr(ResolutionConfig, key):
            found[key] = _made(type(getattr(ResolutionConfig, key)), value, f"resolution.{key}")
    return _made(ResolutionConfig, found, "resolution")


def video_of_options(given: Mapping[str, Any]) -> VideoConfig:
    """Which frames of a video are taken; ValueError for keys that there are not."""
    return _made(VideoConfig, given, "video")


def _made(kind: type[C], given: Mapping[str, Any], where: str) -> C:
    """A configuration of keys; the keys of problems are those below `where`."""
    known = [f.name for f in fields(kind)]
    for key in given:
        if key not in known:
            rule = f"must be one of {', '.join(known)}"
            raise invalid(f"{where}.{key}", "unknown_key", given[key], rule, "correct the key")
    try:
        return kind(**given)
    except ValueError as error:
        raise ProblemError([p.under(where) for p in problems_of(error)]) from error


def problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of options of `VisionChatSource` that cannot be."""
    for key, known in _CHOICES.items():
        if options[key] not in known:
            rule = f"must be one of {', '.join(known)}"
            yield Problem(key, "unknown", options[key], rule, f"use {known[0]!r}")

    try:
        resolution = resolution_of(options["resolution"] or {})
        score_of(video_of_options(options["video"] or {}).score)
    except ValueError as error:
        yield from problems_of(error)
        return

    yield from _token_problems(options, resolution)
    if options.get("image_masks") and resolution.name == "budget":
        rule = "must be False when resolution.name is 'budget', whose patches have none"
        yield Problem("image_masks", "excludes", True, rule, "remove it")

    yield from _group_problems(options)
    for key in ("max_image_pixels", "max_image_bytes"):
        if not is_size(options.get(key, 1), 2**62):
            rule = "must be a whole number of at least 1"
            yield Problem(key, "size", options[key], rule, "leave it out")

    if not isinstance(images := options.get("images"), str | None) or images == "":
        yield Problem("images", "type", images, "must be the path of a folder", "leave it out")
    yield from option_problems(options.get("ignore_keys", ()), options.get("strict", False))
    mean = options["mean"]
    if len(mean) != 3 or not all(is_finite(v) and 0 <= v <= 1 for v in mean):
        rule = "must be three numbers from 0 to 1"
        yield Problem("mean", "range", mean, rule, "give that of the encoder")


def _group_problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    group = options.get("group")
    if group is not None and not is_size(group, _MOST):
        rule = f"must be a whole number from 1 to {_MOST}"
        yield Problem("group", "size", group, rule, "give train.global_batch")
    elif group is not None and options["pack"]:
        rule = "needs rows of one sample each, and pack is True"
        yield Problem("group", "excludes", group, rule, "set pack = false, or remove group")


def _token_problems(options: Mapping[str, Any], resolution: ResolutionConfig) -> Iterator[Problem]:
    each = options["tokens_per_tile"]
    for key, default in _PATCHES.items():
        if not is_size(options[key], _MOST):
            rule = f"must be a whole number from 1 to {_MOST}"
            yield Problem(key, "size", options[key], rule, f"use {default}")
        elif resolution.name != "budget" and options[key] != default:
            rule = f"is a key of resolution.name 'budget', and name is {resolution.name!r}"
            yield Problem(key, "foreign", options[key], rule, "remove it")

    if resolution.name != "budget" and not is_size(each, _MOST):
        rule = f"must be a whole number from 1 to {_MOST}"

        yield Problem("tokens_per_tile", "size", each, rule, "give that of the model's adapter")
    elif resolution.name == "budget" and each is not None:
        rule = "means nothing when resolution.name is 'budget', where sizes give it"
        yield Problem("tokens_per_tile", "foreign", each, rule, "remove it")
    elif resolution.name == "budget" and all(is_size(options[key], _MOST) for key in _PATCHES):
        side = options["patch_size"] * options["merge"]
        if resolution.budget.multiple % side:
            multiple, rule = (
                resolution.budget.multiple,
                f"must be a multiple of patch_size * merge, {side}",
            )
            yield Problem("resolution.budget.multiple", "divides", multiple, rule, f"use {side}")
    elif options["positions"] == "mrope" and int(each**0.5) ** 2 != each:
        rule = "must be a square with positions 'mrope', whose tokens have rows and columns"
        yield Problem("tokens_per_tile", "square", each, rule, "change one")


def fit_problems(
    options: Mapping[str, Any], image_id: int, model: Any, where: str
) -> list[Problem]:
    """Problems of options of a source, the table `where`, that are not those of a `VLM`; none for another model.

    Usage: `fit_problems(source.options, source.image_id, model, "data.sources.talks.options")`.
    """
    config = getattr(model, "config", None)
    if not hasattr(model, "vision") or not hasattr(config, "placeholders"):
        return []
    return [
        *_model_token_problems(options, image_id, config, where),
        *_model_image_problems(options, model, where),
    ]


def _model_token_problems(
    options: Mapping[str, Any], image_id: int, config: Any, where: str
) -> Iterator[Problem]:
    if options["positions"] != config.positions:
        rule = f"must be model.positions {config.positions!r}"
        yield Problem(f"{where}.positions", "mismatch", options["positions"], rule, "change one")
    own = options.get("bidirectional", "none")
    if own != config.bidirectional:
        rule = f"must be model.bidirectional {config.bidirectional!r}"
        yield Problem(f"{where}.bidirectional", "mismatch", own, rule, "change one")
    ids = [m.first_id for m in config.placeholders.values()]
    if image_id not in ids:
        rule = f"is id {image_id}, and model.modalities has the placeholders {ids}"
        fix = f"set model.modalities.image.first_id = {image_id}"
        yield Problem(f"{where}.image", "placeholder", options["image"], rule, fix)


def _model_image_problems(options: Mapping[str, Any], model: Any, where: str) -> Iterator[Problem]:
    vision, resolution = model.vision, resolution_of(options["resolution"] or {})
    if vision is None:
        return
    if resolution.name == "budget":
        for key in ("patch_size", "merge", "patch_time"):
            own = getattr(vision, key, options[key])
            if options[key] != own:
                rule = f"must be {own}, as in the encoder model.vision"
                yield Problem(f"{where}.{key}", "encoder", options[key], rule, "change one")
        return

    if getattr(vision, "extra_inputs", None) != ("images",):
        return
    own = getattr(vision.config, "vit", None) if vision.config.name == "vit" else vision
    side, patch = getattr(own, "image_size", None), getattr(own, "patch_size", None)
    if side is None or patch is None:
        return

    key = {"fixed": "size"}.get(resolution.name, "tile_size")
    size = getattr(getattr(resolution, resolution.name), key)
    if size != side:
        rule, key = f"must be the image_size {side} of model.vision", f"{resolution.name}.{key}"
        yield Problem(f"{where}.resolution.{key}", "image_size", size, rule, "change one")
        return

    rows = side // patch
    tokens = 1 if model.cross else model.adapter.tokens(rows, rows) + _front_tokens(model)
    if options["tokens_per_tile"] != tokens:
        rule = f"must be {tokens}, which model.vision and model.adapter give for {rows} x {rows} patches"
        value = options["tokens_per_tile"]
        yield Problem(f"{where}.tokens_per_tile", "tokens", value, rule, f"use {tokens}")


def _front_tokens(model: Any) -> int:
    """Number of tokens before those of patches, a class token and registers, that go through the adapter."""
    config = model.config
    apart = config.adapter.name in ("none", "linear", "mlp")
    front: int = getattr(model.vision, "front", 0)
    return front if apart and config.vision.select_feature == "cls_patch" else 0
