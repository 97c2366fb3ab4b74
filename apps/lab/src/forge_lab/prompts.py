"""Prompts with images of a Hugging Face folder, as its tokenizer, chat template and image processor write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forge_ckpt.hf import read_json, read_processor
from forge_data.tokenizer_files import folder_ends
from forge_lab._shared.problems import invalid
from forge_train.errors import ConfigError, config_errors
from forge_vlm import VLM
from forge_vlm.data import Prompts

_FIX = "put the model's own there"
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # numbers of pillow


def folder_prompts(folder: Path, model: VLM) -> Prompts:
    """Build the prompts of a Hugging Face folder.

    A folder without a chat template gets Vicuna's if it is of LLaVA, as the model cards do. ConfigError for a family
    whose image processor Forge cannot follow, and for a folder without one.
    """
    hf = read_json(folder / "config.json")
    family = str(hf.get("model_type"))
    table = _processor(folder)
    options: dict[str, Any] = {
        "tokenizer": str(folder),
        "image": _token(folder, model.config.modalities["image"].first_id),
        "template": "tokenizer" if _has_template(folder) else "vicuna",
        "mean": table.get("image_mean", [0.5, 0.5, 0.5]),
        "resolution": _resolution(folder, family, table),
    }

    if options["template"] == "vicuna" and family != "llava":
        rule = "is missing: questions are written by it"
        raise invalid("chat_template", "missing", ..., rule, _FIX, where=folder, kind=ConfigError)

    if options["resolution"]["name"] == "budget":
        vision = hf["vision_config"]
        options |= {
            "patch_size": vision.get("patch_size", 16),
            "merge": vision.get("spatial_merge_size", 2),
            "patch_time": vision.get("temporal_patch_size", 2),
        }
    else:
        options["tokens_per_tile"] = tokens_per_tile(model)

    with config_errors():
        prompts = Prompts(**options)
        prompts.end_ids = tuple(dict.fromkeys((*prompts.end_ids, *folder_ends(folder))))
    return prompts


def tokens_per_tile(model: VLM) -> int:
    """Image tokens of a tile: outputs of the adapter, or 1 for a model that reads images by cross-attention."""
    if model.cross:
        return 1
    device = next(model.parameters()).device
    with torch.no_grad():
        return int(model.adapter(model.vision(**model.vision.dummy(device))).size(1))


def _processor(folder: Path) -> Mapping[str, Any]:
    table = read_processor(folder)
    if not table:
        name, rule = "preprocessor_config.json", "is missing: it sets how images are split"
        raise invalid(name, "missing", ..., rule, _FIX, where=folder, kind=ConfigError)
    return table


def _resolution(folder: Path, family: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a ResolutionConfig that resizes and splits images as the family's processor does."""
    size, used = (
        table.get("size", {}),
        {"filter": _FILTERS.get(table.get("resample", 3), "bicubic")},
    )
    if family == "llava":
        crop = table.get("crop_size") if table.get("do_center_crop", True) else None
        side = (crop or size).get("height", size.get("shortest_edge", 336))
        fit = "pad" if table.get("do_pad") else "crop" if crop else "stretch"
        return {"name": "fixed", "fixed": {"size": side, "fit": fit, **used}}

    if family in ("idefics3", "smolvlm"):
        tile = table.get("max_image_size", {}).get("longest_edge", 364)
        split, longest = table.get("do_image_splitting", True), size.get("longest_edge", 4 * tile)
        tiles = {"tile_size": tile, "longest_edge": longest, "split": split}
        return {"name": "tiles", "tiles": {**tiles, **used}}

    if family == "internvl":
        most = table.get("max_patches", 12) if table.get("crop_to_patches", True) else 1
        tiles = {"tile_size": size.get("height", 448), "min_tiles": table.get("min_patches", 1)}
        return {"name": "aspect_tiles", "aspect_tiles": {**tiles, "max_tiles": most, **used}}

    if family == "qwen3_vl":
        side = table.get("patch_size", 16) * table.get("merge_size", 2)
        # some versions of transformers write null next to `size`
        least = table.get("min_pixels") or size.get("shortest_edge") or 65536
        most = table.get("max_pixels") or size.get("longest_edge") or 16777216
        budget = {"multiple": side, "min_pixels": least, "max_pixels": most}
        return {"name": "budget", "budget": {**budget, **used}}

    rule = "has images that cannot be split as its processor does"
    fix = "use a run with a source of name 'vlm', or one of llava, idefics3, smolvlm, internvl and qwen3_vl"
    raise invalid("model_type", "unsupported", family, rule, fix, where=folder, kind=ConfigError)


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in read_json(config)


def _token(folder: Path, number: int) -> str:
    """The text of an added token by its id. ConfigError where the tokenizer has no such token."""
    for token in read_json(folder / "tokenizer.json").get("added_tokens", []):
        if token["id"] == number:
            return str(token["content"])
    rule, where = "must have the image token of config.json", folder / "tokenizer.json"
    raise invalid("added_tokens", "not_found", number, rule, _FIX, where=where, kind=ConfigError)
