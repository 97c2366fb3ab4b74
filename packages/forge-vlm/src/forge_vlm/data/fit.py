"""Whether the rows of a source are what a model takes: positions, placeholders, tokens of a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge_vlm.data.options import resolution_of

__all__ = ["fit_problems"]


def fit_problems(options: Mapping[str, Any], image_id: int, model: Any, where: str) -> list[str]:
    """Sentences on options of a source, the table `where`, that are not those of a `VLM`; none for another model.

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
) -> Iterator[str]:
    if options["positions"] != config.positions:
        yield (
            f"{where}.positions {options['positions']!r} must be model.positions {config.positions!r}; change one"
        )
    own = options.get("bidirectional", "none")
    if own != config.bidirectional:
        yield f"{where}.bidirectional {own!r} must be model.bidirectional {config.bidirectional!r}; change one"
    ids = [m.first_id for m in config.placeholders.values()]
    if image_id not in ids:
        yield (
            f"{where}.image {options['image']!r} is id {image_id}, and model.modalities has the placeholders {ids}; set "
            f"model.modalities.image.first_id = {image_id}"
        )


def _picture_problems(options: Mapping[str, Any], model: Any, where: str) -> Iterator[str]:
    vision, resolution = model.vision, resolution_of(options["resolution"] or {})
    if vision is None:
        return
    if resolution.name == "budget":
        for key in ("patch_size", "merge", "patch_time"):
            own = getattr(vision, key, options[key])
            if options[key] != own:
                yield f"{where}.{key} {options[key]} must be that of the encoder model.vision, {own}; change one"
        return
    if getattr(vision, "extra_inputs", None) != ("images",):
        return
    own = getattr(vision.config, "vit", None) if vision.config.name == "vit" else vision
    side, patch = getattr(own, "image_size", None), getattr(own, "patch_size", None)
    if side is None or patch is None:
        return
    if resolution.name == "fixed" and resolution.fixed.size != side:
        yield (
            f"{where}.resolution.fixed.size {resolution.fixed.size} must be the image_size {side} of model.vision; change one"
        )
        return
    rows = side // patch
    tokens = 1 if model.cross else model.adapter.tokens(rows, rows) + _class_tokens(model)
    if options["tokens_per_tile"] != tokens:
        yield (
            f"{where}.tokens_per_tile {options['tokens_per_tile']} must be {tokens}, which model.vision and model.adapter "
            f"give for {rows} x {rows} patches; use {tokens}"
        )


def _class_tokens(model: Any) -> int:
    """1 where a token of the class stands in front of those of patches and goes through the adapter."""
    config = model.config
    apart = config.adapter.name in ("none", "linear", "mlp")
    has = getattr(model.vision, "has_class_token", False)
    return int(apart and has and config.vision.select_feature == "cls_patch")
