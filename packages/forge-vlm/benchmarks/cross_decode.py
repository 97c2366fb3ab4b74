"""Decoding with cross-attention: keys and values of images from the cache, beside the same computed at each token.

    python packages/forge-vlm/benchmarks/cross_decode.py [--tokens 32] [--images 4]

Prints one JSON line: milliseconds per token of both, medians of five turns each, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from forge_core import SamplingConfig, generate
from forge_vlm import (
    VLM,
    AdapterConfig,
    CrossAttentionConfig,
    FusionConfig,
    ModalityConfig,
    VisionConfig,
    VLMConfig,
)
from forge_vlm.fusion.seen import Seen
from forge_vlm.vision import ViTConfig

IMAGE = 511


def build() -> VLM:
    """Eight layers of 256 with four blocks of cross-attention; 196 tokens an image."""
    cross = CrossAttentionConfig(every_n_layers=2, sees="all")
    vit = ViTConfig(image_size=112, patch_size=8, dim=128, num_layers=2, num_heads=4)
    return VLM(
        VLMConfig(
            vocab_size=512,
            dim=256,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            max_seq_len=256,
            vision=VisionConfig(vit=vit),
            adapter=AdapterConfig("linear"),
            fusion=FusionConfig("cross_attention", cross_attention=cross),
            modalities={"image": ModalityConfig(first_id=IMAGE)},
        )
    )


def seconds(model: VLM, prompt: torch.Tensor, images: torch.Tensor, tokens: int) -> float:
    """Of `tokens` new ones, without the prefill."""
    greedy, took = SamplingConfig(temperature=0.0), []
    for count in (1, tokens + 1):
        began = time.perf_counter()
        generate(model, prompt, count, greedy, extras={"images": images})
        took.append(time.perf_counter() - began)
    return took[1] - took[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--images", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, size = build(), arguments.images
    prompt = torch.tensor([[*[IMAGE] * size, *range(1, 33)]])
    images = torch.randn(size, 3, 112, 112)
    cached = Seen.newest

    def again(self: Seen) -> Seen:
        return cached(self)._replace(features=self.features)

    found: dict[str, list[float]] = {"cached": [], "again": []}
    for _ in range(5):
        for name, newest in (("cached", cached), ("again", again)):
            Seen.newest = newest  # type: ignore[method-assign]
            took = seconds(model, prompt, images, arguments.tokens)
            found[name].append(1e3 * took / arguments.tokens)
    row = {name: round(statistics.median(times), 2) for name, times in found.items()}
    print(json.dumps({"tokens": arguments.tokens, "images": size, "ms_per_token": row}))


if __name__ == "__main__":
    main()
