"""A forward for a planner: as many images in each row as the config counts, and no value is read.

Shapes: B rows, S tokens of a row here, N images of a row, M tokens of them, D width of the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core import Transformer
from forge_vlm._shared.problems import invalid
from forge_vlm.fusion.seen import Seen
from forge_vlm.place import place
from forge_vlm.vision.features import Features

if TYPE_CHECKING:
    from forge_vlm.model import VLM

__all__ = ["plan_forward"]


def plan_forward(model: VLM, tokens: Tensor) -> Tensor:
    """Logits (B, S, V) of tokens (B, S), whose activations and shapes are those of a forward with images.

    Encoder and adapter run on B N images. For fake tensors: where placeholders stand, which tokens are of which modality,
    and which image a token sees are values, and are taken as those of text. ValueError where the encoder reads values
    itself, or does not say what an image is (`media_of`).
    """
    number, rows = model.config.images_per_row, len(tokens)
    fusion = model.config.fusion
    if fusion.name == "moma" and fusion.moma.router != "token_choice":
        rule = "takes tokens by the documents of each row, and cannot be planned"
        fix = "plan 'token_choice', or use parallel.layout = 'manual'"
        raise invalid("fusion.moma.router", "planned", fusion.moma.router, rule, fix)
    positions = torch.arange(tokens.size(1), device=tokens.device)[None]
    if model.vision is None or not number:
        return model.project(Transformer.hidden(model, model.embed(tokens), positions))
    if not hasattr(model.vision, "media_of"):
        rule = "cannot be planned: its encoder does not define media_of(images, pixels, device)"
        fix = "add it, or use parallel.layout = 'manual'"
        raise invalid("vision.name", "planned", model.config.vision.name, rule, fix)
    features = _features(model, rows * number, tokens.device)
    adapted = model.adapter(features).flatten(0, 1)  # (B M, D)
    stream, seen = model.embed(tokens), None
    # under sequence parallelism the stream is a part of the tokens
    here = torch.zeros(stream.shape[:2], dtype=torch.bool, device=tokens.device)
    if model.cross:
        first = here.long()
        of_rows = adapted.unflatten(0, (rows, -1))  # (B, M, D)
        ids = of_rows.new_zeros(of_rows.shape[:2], dtype=torch.int64)
        seen = Seen(of_rows, ids, first, first + 1)
        layers: tuple[Tensor, ...] = ()
    else:
        nothing = torch.zeros_like(stream)
        layers = tuple(place(nothing, layer, here) for layer in features.layers)
        stream = place(stream, adapted, here)
    x = Transformer.hidden(model, stream, positions, layer_features=layers, media=seen)
    return model.project(x)


def _features(model: VLM, images: int, device: Any) -> Features:
    """Features of so many images of the size that the model counts."""
    media = model.vision.media_of(images, model.config.pixels_per_image, device)
    try:
        return model._encode(media)
    except RuntimeError as error:
        if (
            "data-dependent" not in str(error).lower()
            and "DataDependent" not in type(error).__name__
        ):
            raise
        kind = model.config.vision.transformers.get("model_type")
        rule = "reads values of images in its forward, and cannot be planned"
        fix = "use parallel.layout = 'manual'"
        raise invalid("vision.transformers.model_type", "planned", kind, rule, fix) from error
