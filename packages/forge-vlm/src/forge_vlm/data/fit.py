"""Whether the rows of a source are what a model takes: positions, placeholders, tokens of a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge_vlm._shared.problems import Problem
from forge_vlm.data.options import resolution_of

__all__ = ["fit_problems"]


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
        *_token_problems(options, image_id, config, where),
        *_picture_problems(options, model, where),
    ]


def _token_problems(
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


def _picture_problems(options: Mapping[str, Any], model: Any, where: str) -> Iterator[Problem]:
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
