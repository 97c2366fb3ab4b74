"""Images in the decoder: four fusions, in plain torch. Positions and masks are in positions.py, MoMa in moma.py.

Sources: Liu et al. 2023 (LLaVA: image tokens in the stream), Alayrac et al. 2022 (Flamingo) and Llama 3.2 Vision (gated
cross-attention), Liang et al. 2024 (mixture of transformers, arXiv 2411.04996).

`Rows.extras` of samples with images:

- "images": list of B tensors (n, 3, height, width) uint8, the images of each sample in order; encoder `vit`
- "patches": list of B tensors (p, 3 * patch_size^2) uint8, and "grids": list of B tensors (n, 3) int64, time, rows and
  columns of each image in patches; encoder `packed_vit`
- "image_ids", "clip_ids", "media_ids", "prefix_ids", "branch_ids": (B, S) int64, those that the stream gave
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .model import (
    Config,
    Weights,
    attend,
    block,
    embed,
    feed_forward,
    head_dim,
    layer_rotate,
    linear,
    mixer_of_layer,
    norm,
    of_layer,
    project,
    rms_norm,
    score_scale,
    segments,
    width_and_depth,
)
from .moma import MomaLosses, moma
from .positions import (
    NO_LABEL,
    RAGGED,
    SPAN_IDS,
    Images,
    Mask,
    check_stream,
    groups_of,
    mask_of,
    placeholders,
)
from .rows import Rows
from .vision import image_tokens


def image_rows(arrays: dict[str, np.ndarray], indices: list[int]) -> Rows:
    """Return the samples `indices` of a file rows/NAME.npz; -1 is a padding sample."""
    size = arrays["tokens"].shape[1]
    fills = {"labels": NO_LABEL, "document_ids": -1}

    def stacked(name: str) -> Tensor:
        blank = np.full_like(arrays[name][0], fills.get(name, -1 if name.endswith("_ids") else 0))
        if name == "positions":
            blank = blank + np.arange(size)
        return torch.from_numpy(np.stack([arrays[name][i] if i >= 0 else blank for i in indices]))

    def ragged(name: str) -> list[Tensor]:
        offsets, values = arrays[f"{name}.offsets"], torch.from_numpy(arrays[name])
        return [values[offsets[i] : offsets[i + 1]] if i >= 0 else values[:0] for i in indices]

    extras: dict[str, Any] = {name: ragged(name) for name in RAGGED if name in arrays}
    for name in (*SPAN_IDS.values(), "branch_ids"):
        if name in arrays:
            extras[name] = stacked(name)

    labels = stacked("labels")
    weights = stacked("weights") if "weights" in arrays else torch.ones(labels.shape)
    return Rows(
        tokens=stacked("tokens"),
        labels=labels,
        positions=stacked("positions"),
        documents=stacked("document_ids"),
        weights=weights * (labels != NO_LABEL),
        ids=torch.tensor(indices),
        source=torch.zeros(len(indices), dtype=torch.int64),
        extras=extras,
    )


def images_of(config: Config, weights: Weights, rows: Rows) -> list[Images]:
    """Encode the images of each sample and find their placeholders."""
    here, found = placeholders(config, rows), []
    for b in range(len(rows.tokens)):
        has_images = any(name in rows.extras for name in RAGGED)
        tokens = image_tokens(config, weights, rows.extras, b) if has_images else []
        free = here[b].nonzero().flatten().tolist()
        images = Images(tokens, [])
        for image in tokens:
            count = 1 if config["fusion"]["name"] == "cross_attention" else len(image)
            images.places.append(free[:count])
            free = free[count:]
        assert not free, f"sample {b} has {len(free)} placeholders more than tokens of images"
        found.append(images)
    return found


def embed_with_images(config: Config, weights: Weights, rows: Rows, images: list[Images]) -> Tensor:
    """Embed tokens (B, S) and put the tokens of images in the place of their placeholders: (B, S, D)."""
    x = embed(config, weights, rows.tokens)
    if config["fusion"]["name"] == "cross_attention":
        return x
    x = x.clone()
    for b, of_row in enumerate(images):
        for tokens, places in zip(of_row.tokens, of_row.places, strict=True):
            x[b, places] = tokens
    return x


# Cross-attention


def cross_layers(config: Config) -> list[int]:
    """Return the text layers with a block before them: the last of every n, or those of `layers`."""
    options = config["fusion"]["cross_attention"]
    if options["layers"]:
        return list(options["layers"])
    n = options["every_n_layers"]
    return [layer for layer in range(config["num_layers"]) if (layer + 1) % n == 0]


def seen_images(sees: str, numbers: Tensor, images: Images, i: int) -> list[int]:
    """Return the images that token i of a sample sees: at or before it, in its document (`numbers` (S,))."""
    places = [place[0] for place in images.places]
    before = [n for n, place in enumerate(places) if place <= i and numbers[place] == numbers[i]]
    if sees == "all" or not before:
        return before
    last = before[-1]
    if sees == "last":
        return [last]
    group = [last]  # images whose placeholders stand side by side
    while group[0] - 1 in before and places[group[0] - 1] == places[group[0]] - 1:
        group.insert(0, group[0] - 1)
    return group


def image_mask(config: Config, rows: Rows, b: int, images: Images) -> Tensor:
    """Return (S, T) bool: which of the T tokens of the images of sample b each of its tokens sees."""
    sees, numbers = config["fusion"]["cross_attention"]["sees"], segments(rows.documents)[b]
    lengths = [len(tokens) for tokens in images.tokens]
    mask = torch.zeros(len(numbers), sum(lengths), dtype=torch.bool)
    for i in range(len(numbers)):
        for n in seen_images(sees, numbers, images, i):
            mask[i, sum(lengths[:n]) : sum(lengths[: n + 1])] = True
    return mask


def cross_attention(
    config: Config, weights: Weights, prefix: str, x: Tensor, features: Tensor, mask: Tensor
) -> Tensor:
    """Attention of tokens (S, D) to the features (T, D) that they see, without positions: (S, D).

    `mask` is (S, T) bool. A token that sees no image gets 0.
    """
    size = head_dim(config)
    q = linear(weights, f"{prefix}q_proj", x).view(1, len(x), -1, size)
    k = linear(weights, f"{prefix}k_proj", features).view(1, len(features), -1, size)
    v = linear(weights, f"{prefix}v_proj", features).view(1, len(features), -1, size)
    if config["fusion"]["cross_attention"]["qk_norm"]:
        q = rms_norm(q, weights[f"{prefix}q_norm.weight"], config["norm_eps"])
        k = rms_norm(k, weights[f"{prefix}k_norm.weight"], config["norm_eps"])

    sees = mask.any(dim=1, keepdim=True)
    allowed = (mask | ~sees)[None]  # no row of the softmax is empty
    out = attend(q, k, v, allowed, score_scale(config | {"mixer": "attention"}))[0].flatten(1)
    return linear(weights, f"{prefix}o_proj", out) * sees


def cross_block(
    config: Config,
    weights: Weights,
    prefix: str,
    x: Tensor,
    images: list[Images],
    masks: list[Tensor],
) -> Tensor:
    """A gated block before a text layer: x + tanh(gate) f(norm(x)) for both sublayers (Flamingo, section 2.4).

    It is this block and plain attention whatever `block` and `mixer` are. Its norms of queries and keys have no 1 added.
    `masks` are those of `image_mask`.
    """
    scale = config["residual_scale"] * width_and_depth(config)[1] ** -0.5
    found = []
    for stream, of_sample, mask in zip(x, images, masks, strict=True):
        if of_sample.tokens:  # otherwise the stream passes unchanged
            features = torch.cat(of_sample.tokens)
            y = norm(config, weights, f"{prefix}mixer_norm", stream)
            y = cross_attention(config, weights, f"{prefix}mixer.", y, features, mask)
            stream = stream + scale * weights[f"{prefix}mixer_gate"].tanh() * y

            y = norm(config, weights, f"{prefix}feed_forward_norm", stream)
            y = feed_forward(config, weights, f"{prefix}feed_forward.", y)
            y = y * mask.any(dim=1, keepdim=True)
            stream = stream + scale * weights[f"{prefix}feed_forward_gate"].tanh() * y
        found.append(stream)
    return torch.stack(found)


# Weights by modality


def parted(groups: dict[str, Tensor], f: Callable[[str], Tensor]) -> Tensor:
    """Return f(group) where a token is of that group: (B, S, ...)."""
    out = torch.zeros(())
    for name, here in groups.items():
        y = f(name)
        mask = here.view(*here.shape, *[1] * (y.dim() - 2))
        out = torch.where(mask, y, out.to(y.dtype))
    return out


def mixture_block(
    config: Config, weights: Weights, layer: int, x: Tensor, rows: Rows, mask: Mask
) -> Tensor:
    """A block of a mixture of transformers: weights by modality, attention over all tokens."""
    share = config["fusion"]["mixture_of_transformers"]["share"]
    groups = groups_of(config, rows.tokens, share)
    prefixes = {name: f"layers.{layer}.towers.{name}." for name in groups} | {
        "text": f"layers.{layer}."
    }
    scale = config["residual_scale"] * width_and_depth(config)[1] ** -0.5
    of_this = of_layer(config, layer)
    turn = layer_rotate(of_this, rows.positions, x.dtype)
    allowed = mask(rows.documents, of_this["attention"]["window"])

    def normed(name: str, y: Tensor) -> Tensor:
        return parted(groups, lambda group: norm(config, weights, prefixes[group] + name, y))

    def mixer(y: Tensor) -> Tensor:
        q, k, v = (
            parted(
                groups,
                lambda group, n=n: project(config, weights, f"{prefixes[group]}mixer.", n, y),
            )
            for n in ("q", "k", "v")
        )
        out = attend(
            turn(q), turn(k), v, allowed, score_scale(of_this), config["attention"]["softcap"]
        )
        out = out.flatten(2)
        return parted(groups, lambda group: linear(weights, f"{prefixes[group]}mixer.o_proj", out))

    def ff(y: Tensor) -> Tensor:
        return parted(
            groups,
            lambda group: feed_forward(config, weights, f"{prefixes[group]}feed_forward.", y),
        )

    for name, sublayer in (("mixer", mixer), ("feed_forward", ff)):
        y = x if config["block"] == "post_norm" else normed(f"{name}_norm", x)
        y = sublayer(y)
        x = x + scale * (y if config["block"] == "pre_norm" else normed(f"{name}_post_norm", y))
    return x


# The decoder

FeedForward = Callable[[str, int, Tensor], Tensor]


def stream_with_images(
    config: Config,
    weights: Weights,
    rows: Rows,
    ff: FeedForward,
    losses: MomaLosses,
    training: bool,
) -> Tensor:
    """Return the stream (B, S, D) before the final norm; `losses` collects those of MoMa's routers."""
    if config["mrope"] and rows.positions.dim() == 2:  # text without images: three equal axes
        rows = replace(rows, positions=rows.positions[:, None].expand(-1, 3, -1))
    images = images_of(config, weights, rows)
    check_stream(config, rows, images)
    mask, fusion = mask_of(config, rows, images), config["fusion"]["name"]
    before, masks = [], []
    if fusion == "cross_attention":
        before = cross_layers(config)
        masks = [image_mask(config, rows, b, found) for b, found in enumerate(images)]

    if fusion == "moma":
        groups = groups_of(config, rows.tokens, config["fusion"]["moma"]["share"])
        losses.count({name: here & (rows.documents >= 0) for name, here in groups.items()})

    x = embed_with_images(config, weights, rows, images)
    for layer in range(config["num_layers"]):
        prefix = f"layers.{layer}."
        if layer in before:
            x = cross_block(config, weights, f"layers.cross_{layer}.", x, images, masks)
        if fusion == "mixture_of_transformers":
            x = mixture_block(config, weights, layer, x, rows, mask)
            continue

        def sublayer(y: Tensor, name: str = f"{prefix}feed_forward.", layer: int = layer) -> Tensor:
            if fusion == "moma":
                return moma(config, weights, name, y, rows, losses, training)
            return ff(name, layer, y)

        mixer = mixer_of_layer(
            config, weights, f"{prefix}mixer.", layer, rows.positions, rows.documents, mask
        )
        x = block(config, weights, prefix, x, mixer, sublayer)
    return x
