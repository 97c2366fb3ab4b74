"""Configuration of resolutions, validated when made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from forge_vlm._config import foreign_table, size_problems
from forge_vlm._shared.fields import field
from forge_vlm._shared.problems import Problem, raise_problems

__all__ = ["AspectTilesConfig", "BudgetConfig", "FixedConfig", "ResolutionConfig", "TilesConfig"]

FILTERS = ("bilinear", "bicubic", "lanczos")
FITS = ("pad", "stretch", "crop")
LONGEST = 4096  # of Idefics3's and SmolVLM's images
_FILTER_HELP = "how pixels are resampled: bilinear, bicubic, or lanczos"


def _table_problems(c: object, sizes: dict[str, int]) -> Iterator[Problem]:
    yield from size_problems(c, sizes)
    for key, names in (("filter", FILTERS), ("fit", FITS)):
        value = getattr(c, key, names[0])
        if value not in names:
            yield Problem(key, "unknown", value, f"must be one of {', '.join(names)}", "choose one")


def _aspect_problems(c: AspectTilesConfig) -> Iterator[Problem]:
    wrong = list(_table_problems(c, {"tile_size": 2**14, "min_tiles": 1024, "max_tiles": 1024}))
    yield from wrong
    if not wrong and c.min_tiles > c.max_tiles:
        rule = f"must be at most max_tiles {c.max_tiles}"
        yield Problem("min_tiles", "order", c.min_tiles, rule, "lower it")


def _budget_problems(c: BudgetConfig) -> Iterator[Problem]:
    sizes = {"multiple": 2**14, "min_pixels": 2**40, "max_pixels": 2**40}
    wrong = list(_table_problems(c, sizes))
    yield from wrong
    if not wrong and c.min_pixels > c.max_pixels:
        rule = f"must be at most max_pixels {c.max_pixels}"
        yield Problem("min_pixels", "order", c.min_pixels, rule, "lower it")
    if not wrong and c.max_pixels < c.multiple**2:
        rule = f"must hold one square of multiple {c.multiple}"
        yield Problem("max_pixels", "range", c.max_pixels, rule, "raise it")


@dataclass(frozen=True)
class FixedConfig:
    """A square: padded to one with the mean color (LLaVA-1.5), stretched (SigLIP), or cropped at its centre (CLIP)."""

    size: int = 336
    """height and width of an image, in pixels"""
    fit: Literal["pad", "stretch", "crop"] = "pad"
    """pad the shorter side with the mean color, stretch it, or crop the longer side"""
    filter: Literal["bilinear", "bicubic", "lanczos"] = field("bicubic", _FILTER_HELP)

    def __post_init__(self) -> None:
        raise_problems("fixed", _table_problems(self, {"size": 2**14}))


@dataclass(frozen=True)
class TilesConfig:
    """Squares row by row, then the full image as one of them (Idefics3, SmolVLM); text says row and column of each."""

    tile_size: int = 512
    """height and width of a tile, in pixels"""
    longest_edge: int = 2048
    """the longer side of an image before it is split, in pixels: smaller ones grow to it"""
    split: bool = True
    """cut the image; otherwise it is one square"""
    filter: Literal["bilinear", "bicubic", "lanczos"] = field("lanczos", _FILTER_HELP)

    def __post_init__(self) -> None:
        sizes = {"tile_size": 2**14, "longest_edge": LONGEST}
        raise_problems("tiles", _table_problems(self, sizes))


@dataclass(frozen=True)
class AspectTilesConfig:
    """The grid of squares whose aspect is nearest to the image's, and the full image after them (InternVL)."""

    tile_size: int = 448
    """height and width of a tile, in pixels"""
    min_tiles: int = 1
    """the least number of tiles, the full image not counted"""
    max_tiles: int = 12
    """the largest number of tiles, the full image not counted"""
    filter: Literal["bilinear", "bicubic", "lanczos"] = field("bicubic", _FILTER_HELP)

    def __post_init__(self) -> None:
        raise_problems("aspect_tiles", _aspect_problems(self))


@dataclass(frozen=True)
class BudgetConfig:
    """The image's own aspect, in full windows of patches, with a number of pixels between two bounds (Qwen2-VL)."""

    multiple: int = 32
    """sides are multiples of it: the side of a patch times the patches merged"""
    min_pixels: int = 65536
    """smaller images grow to it"""
    max_pixels: int = 1048576
    """larger images shrink to it"""
    filter: Literal["bilinear", "bicubic", "lanczos"] = field("bicubic", _FILTER_HELP)

    def __post_init__(self) -> None:
        raise_problems("budget", _budget_problems(self))


TABLES = ("fixed", "tiles", "aspect_tiles", "budget")


@dataclass(frozen=True)
class ResolutionConfig:
    """What size images have when they reach the encoder, by name; the options stand in the table of that name.

    ResolutionConfig("tiles", tiles=TilesConfig(tile_size=384, longest_edge=1536))
    """

    name: Literal["fixed", "tiles", "aspect_tiles", "budget"] = "fixed"
    """fixed (one square), tiles (Idefics3, SmolVLM), aspect_tiles (InternVL), or budget (own aspect, Qwen2-VL)"""
    fixed: FixedConfig = FixedConfig()
    """the resolution fixed"""
    tiles: TilesConfig = TilesConfig()
    """the resolution tiles"""
    aspect_tiles: AspectTilesConfig = AspectTilesConfig()
    """the resolution aspect_tiles"""
    budget: BudgetConfig = BudgetConfig()
    """the resolution budget"""

    def __post_init__(self) -> None:
        raise_problems("resolution", _problems(self))


def _problems(c: ResolutionConfig) -> Iterator[Problem]:
    if c.name not in TABLES:
        rule = f"must be one of {', '.join(TABLES)}"
        yield Problem("name", "unknown", c.name, rule, "use fixed for one square")
    for table in TABLES:
        yield from foreign_table(c, table, table)
