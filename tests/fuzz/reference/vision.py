"""Image encoders and adapters: one image at a time, in plain torch.

Sources: Dosovitskiy et al. 2020 (ViT, pre-norm blocks), Tschannen et al. 2025 (SigLIP 2 NaFlex: position embeddings resized
to the grid of an image), Liu et al. 2023 (LLaVA-1.5: two linear layers with GELU), Shi et al. 2016 and Idefics3 (pixel
shuffle), Chen et al. 2024 (InternVL: pixel shuffle with LayerNorm and two layers), Deitke et al. 2024 (Molmo: attention
with the mean of the neighbors as query), Alayrac et al. 2022 (Flamingo: perceiver resampler).

Weights are a dictionary by Forge's names; `part` is the prefix of the names that a function reads, such as "vision.".
`T` tokens of one image in row-major order, `W` width of the encoder's features, `D` width of the decoder.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def linear(weights: Weights, part: str, x: Tensor) -> Tensor:
    """Return x W^T, plus the bias if there is one."""
    bias = weights.get(part + "bias")
    y = x @ weights[part + "weight"].T
    return y if bias is None else y + bias


def layer_norm(weights: Weights, part: str, x: Tensor) -> Tensor:
    """LayerNorm with eps 1e-5, as all norms of encoders and adapters have."""
    return F.layer_norm(x, x.shape[-1:], weights[part + "weight"], weights[part + "bias"], 1e-5)


def full_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """Attention of each query to all keys: (Q, W), (K, W), (K, W) -> (Q, W)."""
    width = q.shape[1] // num_heads
    heads = []
    for h in range(num_heads):
        part = slice(h * width, (h + 1) * width)
        scores = q[:, part] @ k[:, part].T * width**-0.5
        heads.append(scores.softmax(dim=-1) @ v[:, part])
    return torch.cat(heads, dim=1)


# Encoders


def normalize(vision: dict[str, Any], pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (pixels / 255 - mean) / std of 8-bit pixels (..., 3), computed in fp32 as Forge's models do."""
    mean = torch.tensor(vision["mean"] or [0.5, 0.5, 0.5])
    std = torch.tensor(vision["std"] or [0.5, 0.5, 0.5])
    return ((pixels.float() / 255 - mean) / std).to(dtype)


def patches_of_image(image: Tensor, patch_size: int) -> Tensor:
    """Cut an image (3, height, width) into patches (T, patch_size, patch_size, 3), from left to right, top to bottom."""
    rows, columns = image.shape[1] // patch_size, image.shape[2] // patch_size
    patches = []
    for row in range(rows):
        for column in range(columns):
            top, left = row * patch_size, column * patch_size
            patch = image[:, top : top + patch_size, left : left + patch_size]
            patches.append(patch.permute(1, 2, 0))
    return torch.stack(patches)


def patches_of_rows(rows: Tensor, grid: list[int], patch_size: int, merge: int) -> Tensor:
    """Bring the patches of one image, as `cut_patches` writes them, into row-major order.

    Rows (T, 3 * patch_size^2) have the channel first. Windows of merge x merge patches follow one another, and the patches
    of a window too.
    """
    _, height, width = grid
    ordered = torch.empty_like(rows)
    number = 0
    for window_row in range(height // merge):
        for window_column in range(width // merge):
            for row in range(merge):
                for column in range(merge):
                    place = (window_row * merge + row) * width + window_column * merge + column
                    ordered[place] = rows[number]
                    number += 1
    return ordered.view(-1, 3, patch_size, patch_size).permute(0, 2, 3, 1)


def triangle_filter(size: int, new_size: int, like: Tensor) -> Tensor:
    """Return the matrix (new_size, size) of a bilinear resize with antialiasing, as in Pillow: its rows sum to 1."""
    scale = size / new_size
    support = max(scale, 1.0)
    filters = torch.zeros(new_size, size).to(like)
    for i in range(new_size):
        center = (i + 0.5) * scale
        for j in range(size):
            filters[i, j] = max(0.0, 1 - abs(j + 0.5 - center) / support)
    return filters / filters.sum(dim=1, keepdim=True)


def position_embedding(weights: Weights, part: str, rows: int, columns: int) -> Tensor:
    """Return the trained position embeddings (rows * columns, W), resized from their square."""
    table = weights[part + "positions.weight"]
    side = int(table.shape[0] ** 0.5)
    square = table.view(side, side, -1)
    # F.interpolate(antialias=True) of torch 2.13 is wrong for channels-last inputs and one column: it does not blend rows.
    vertical, horizontal = triangle_filter(side, rows, table), triangle_filter(side, columns, table)
    return torch.einsum("ri,cj,ijw->rcw", vertical, horizontal, square).flatten(0, 1)


def transformer(
    weights: Weights, part: str, x: Tensor, num_layers: int, num_heads: int
) -> list[Tensor]:
    """Return the hidden states of an encoder: its input (T, W), then the output of each block."""
    states = [x]
    for layer in range(num_layers):
        block = f"{part}layers.{layer}."
        q, k, v = linear(weights, block + "qkv.", layer_norm(weights, block + "norm1.", x)).chunk(
            3, dim=-1
        )
        x = x + linear(weights, block + "out.", full_attention(q, k, v, num_heads))

        hidden = linear(weights, block + "up.", layer_norm(weights, block + "norm2.", x))
        x = x + linear(weights, block + "down.", F.gelu(hidden, approximate="tanh"))
        states.append(x)
    return states


def merged(x: Tensor, rows: int, columns: int, merge: int) -> Tensor:
    """Concatenate the features of each merge x merge window: (T, W) -> (T / merge^2, merge^2 * W)."""
    tokens = []
    for row in range(0, rows, merge):
        for column in range(0, columns, merge):
            window = [
                x[(row + i) * columns + column + j] for i in range(merge) for j in range(merge)
            ]
            tokens.append(torch.cat(window))
    return torch.stack(tokens)


def encode(
    model: dict[str, Any], weights: Weights, patches: Tensor, rows: int, columns: int
) -> Tensor:
    """Encode the normalized patches of one image, (T, patch_size, patch_size, 3) in row-major order.

    `vision.select_layer` names hidden states, which are concatenated: 0 is the input of the first block, and the last one
    is without the final norm. Empty: the last state after the final norm. `select_feature` changes nothing, as these
    encoders have neither a class token nor registers.
    """
    vision, part = model["vision"], "vision."
    vit = vision["vit"]
    # The weight of the patches reads channel, row, column, as a convolution does.
    x = linear(weights, part + "patches.", patches.permute(0, 3, 1, 2).flatten(1))
    x = x + position_embedding(weights, part, rows, columns)
    states = transformer(weights, part, x, vit["num_layers"], vit["num_heads"])

    if vision["select_layer"]:
        features = torch.cat([states[layer] for layer in vision["select_layer"]], dim=-1)
    else:
        features = layer_norm(weights, part + "norm.", states[-1])
    return (
        merged(features, rows, columns, vit["merge"])
        if vision["name"] == "packed_vit"
        else features
    )


# Adapters


def windows(x: Tensor, rows: int, columns: int, factor: int) -> Tensor:
    """Return the features of each factor x factor window: (T, W) -> (T / factor^2, factor^2, W)."""
    found = []
    for row in range(0, rows, factor):
        for column in range(0, columns, factor):
            found.append(
                torch.stack(
                    [
                        x[(row + i) * columns + column + j]
                        for i in range(factor)
                        for j in range(factor)
                    ]
                )
            )
    return torch.stack(found)


def resample(config: dict[str, Any], weights: Weights, part: str, features: Tensor) -> Tensor:
    """Flamingo's perceiver resampler: trained latents attend to the features and to themselves."""
    features = linear(weights, part + "proj.", features)
    x = weights[part + "latents.weight"]
    for layer in range(config["num_layers"]):
        block = f"{part}layers.{layer}."
        latents = layer_norm(weights, block + "latents_norm.", x)
        keys = torch.cat([layer_norm(weights, block + "features_norm.", features), latents])
        q = linear(weights, block + "q_proj.", latents)
        k = linear(weights, block + "k_proj.", keys)
        v = linear(weights, block + "v_proj.", keys)
        x = x + linear(weights, block + "o_proj.", full_attention(q, k, v, config["num_heads"]))

        hidden = linear(
            weights, block + "up.", layer_norm(weights, block + "feed_forward_norm.", x)
        )
        x = x + linear(weights, block + "down.", F.gelu(hidden))
    return layer_norm(weights, part + "norm.", x)


def adapt(model: dict[str, Any], weights: Weights, x: Tensor, rows: int, columns: int) -> Tensor:
    """Map the features (T, W) of one image of rows x columns tokens to tokens of the decoder (T', D)."""
    name, part = model["adapter"]["name"], "adapter."
    config = model["adapter"].get(name)

    if name == "none":
        return x
    if name == "linear":
        return linear(weights, part, x)
    if name == "mlp":
        return linear(weights, part + "linear_2.", F.gelu(linear(weights, part + "linear_1.", x)))
    if name == "resampler":
        return resample(config, weights, part, x)

    near = windows(x, rows, columns, config["factor"])  # (T', factor^2, W)
    if name == "average_pool":
        return linear(weights, part + "proj.", near.mean(dim=1))
    if name == "pixel_shuffle":
        return linear(weights, part + "proj.", near.flatten(1))
    if name == "pixel_shuffle_mlp":
        normed = layer_norm(weights, part + "norm.", near.flatten(1))
        return linear(
            weights, part + "linear_2.", F.gelu(linear(weights, part + "linear_1.", normed))
        )
    if name == "attentional_pool":
        tokens = []
        for window in near:
            q = linear(weights, part + "q_proj.", window.mean(dim=0, keepdim=True))
            k, v = (
                linear(weights, part + "k_proj.", window),
                linear(weights, part + "v_proj.", window),
            )
            tokens.append(full_attention(q, k, v, config["num_heads"]))
        return linear(weights, part + "o_proj.", torch.cat(tokens))
    raise ValueError(f"adapter {name!r} has no reference")


def image_tokens(
    model: dict[str, Any], weights: Weights, extras: dict[str, Any], row: int
) -> list[Tensor]:
    """Return the tokens (T', D) of each image of one sample, in order; see `fusion.image_rows` for `extras`."""
    vision, tokens = model["vision"], []
    vit, dtype = vision["vit"], weights["embedding.weight"].dtype
    if vision["name"] == "vit":
        for image in extras["images"][row]:
            patches = normalize(vision, patches_of_image(image, vit["patch_size"]), dtype)
            side = vit["image_size"] // vit["patch_size"]
            features = encode(model, weights, patches, side, side)
            tokens.append(adapt(model, weights, features, side, side))
        return tokens

    if vision["name"] != "packed_vit":
        raise ValueError(f"encoder {vision['name']!r} has no reference")
    first = 0
    for grid in extras["grids"][row].tolist():
        count = grid[0] * grid[1] * grid[2]
        rows = extras["patches"][row][first : first + count]
        first += count
        patches = normalize(
            vision, patches_of_rows(rows, grid, vit["patch_size"], vit["merge"]), dtype
        )
        features = encode(model, weights, patches, grid[1], grid[2])
        tokens.append(
            adapt(model, weights, features, grid[1] // vit["merge"], grid[2] // vit["merge"])
        )
    return tokens
