"""Modules and names of 0.1, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from forge_vlm._shared.renamed import OldModules, read_renamed

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Module of 0.1 -> module of today, below the package and in full.
_MODULES = {
    "adapters.heads": "adapters.pooling",
    "adapters.resampler": "adapters.pooling",
    "adapters.single": "adapters.build",
    "adapters.windows": "adapters.pooling",
    "data.chat_template": "data.templates",
    "data.errors": "data.files",
    "data.fit": "data.options",
    "data.lengths": "data.index",
    "data.pictures": "data.images",
    "data.pieces": "data.streaming",
    "data.reader": "data.sample",
    "data.samples": "data.index",
    "data.sampling": "data.video",
    "data.shards": "data.streaming",
    "data.stream": "data.packing",
    "data.trees": "data.sample",
    "data.units": "data.prepare",
    "families.modules": "families.keys",
    "fusion.attach": "experimental.moma",
    "fusion.choice": "experimental.routing",
    "fusion.cross_config": "fusion.config",
    "fusion.experts": "experimental.moma",
    "fusion.mixture_of_transformers": "experimental.mixture_of_transformers",
    "fusion.moma": "experimental.moma",
    "fusion.routes": "experimental.routing",
    "fusion.seen": "fusion.cross_attention",
    "fusion.steps": "experimental.moma",
    "loss": "modalities",
    "mask": "sequence.masks",
    "masked": "sequence.masks",
    "place": "sequence.positions",
    "plan": "sequence.plan",
    "positions": "sequence.positions",
    "resolution.budget": "resolution.policies",
    "resolution.build": "resolution.policies",
    "resolution.fixed": "resolution.policies",
    "resolution.layout": "resolution.images",
    "resolution.pictures": "resolution.images",
    "resolution.tiles": "resolution.policies",
    "vision.folder": "vision.build",
    "vision.packed": "vision.vit",
    "vision.pixels": "vision.features",
    "vision.select": "vision.features",
    "work": "flops",
    "planned": "model",
}
MODULES = {f"forge_vlm.{old}": f"forge_vlm.{new}" for old, new in _MODULES.items()}
#: Module -> {name of 0.1: name of today, there or in another module}.
NAMES: dict[str, dict[str, str]] = {
    "forge_vlm.answers": {
        "NORMALISE": "NORMALIZE",  # language: old name
        "Normalise": "Normalize",  # language: old name
    },
    "forge_vlm.data": {
        "Conversations": "VisionChatSource",
        "Picture": "EncodedImage",
        "Piece": "ChatSegment",
    },
    "forge_vlm.data.images": {
        "Pictures": "ImageProcessor",
    },
    "forge_vlm.data.index": {
        "Counted": "SampleIndex",
        "CountedSamples": "forge_vlm.data.packing:IndexedSource",
        "fingerprint_of": "sample_fingerprint",
    },
    "forge_vlm.data.packing": {
        "PictureRows": "RaggedMedia",
        "RowsOfPictures": "PackedRows",
    },
    "forge_vlm.data.records": {
        "Picture": "EncodedImage",
    },
    "forge_vlm.data.sample": {
        "Decoder": "MediaDecoder",
        "Reader": "SampleEncoder",
        "WEIGHTS": "forge_vlm.data.options:WEIGHTS",
    },
    "forge_vlm.data.source": {
        "Conversations": "VisionChatSource",
    },
    "forge_vlm.data.streaming": {
        "Pieces": "Chunks",
        "PictureShards": "PackedShards",
        "StreamedConversations": "StreamedSource",
    },
    "forge_vlm.data.templates": {
        "Piece": "ChatSegment",
        "pieces_of": "segments_of",
    },
    "forge_vlm.fusion": {
        "MixtureBlock": "forge_vlm.experimental:MixtureBlock",
        "MoMa": "forge_vlm.experimental:MoMa",
        "MoMaSteps": "forge_vlm.experimental:MoMaSteps",
        "set_routing_step": "forge_vlm.experimental:set_routing_step",
        "set_row_group": "forge_vlm.experimental:set_row_group",
    },
    "forge_vlm.fusion.config": {
        "refuse_split_rows": "require_full_sequences",
    },
    "forge_vlm.fusion.cross_attention": {
        "Seen": "VisibleImages",
        "images_of_rows": "images_by_sequence",
        "seen_images": "visible_images",
    },
    "forge_vlm.modalities": {
        "learnt": "trained_modalities",  # language: old name
        "learnt_ranges": "discrete_ranges",  # language: old name
    },
    "forge_vlm.model": {
        "plan_forward": "VLM.plan_forward",
    },
    "forge_vlm.sequence.masks": {
        "RowMask": "SequenceMask",
        "masked": "build_mask",
        "refuse_split_mask": "require_no_mask",
    },
    "forge_vlm.sequence.positions": {
        "check_places": "check_placeholders",
        "place": "place_features",
    },
    "forge_vlm.vision.features": {
        "normalised": "normalize_pixels",  # language: old name
    },
    "forge_vlm.vision.patches": {
        "cut_patches": "forge_vlm.vision.features:cut_patches",
    },
}


def renamed(owner: str, level: int = 2) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that reads its old names, with a DeprecationWarning."""
    return read_renamed(NAMES, owner, level)


def renamed_keyword(**names: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator: the function takes an old keyword (old=new) too, with a DeprecationWarning."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*args: _P.args, **keywords: _P.kwargs) -> _T:
            for old, new in names.items():
                if old in keywords:
                    text = f"{function.__qualname__}({old}=) is {new}= now"
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                    keywords[new] = keywords.pop(old)
            return function(*args, **keywords)

        return call

    return decorate


# first: an upgrade in place leaves folders with __pycache__ only, which are packages without content
sys.meta_path.insert(0, OldModules(MODULES))
