"""Mixtures by modality on real ranks: one that has text alone beside one that has all modalities."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_testing import run_on_ranks
from forge_vlm import VLM, FusionConfig, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.fusion import MoMaConfig
from forge_vlm.vision import ViTConfig

pytestmark = pytest.mark.distributed

OPTIONS: dict[str, dict[str, Any]] = {
    "mixture_of_transformers": {},
    "moma": {"balance_loss": 0.0},
    "expert_choice": {"router": "expert_choice"},
}


def build(kind: str) -> VLM:
    name = kind if kind in ("mixture_of_transformers", "moma") else "moma"
    fusion = FusionConfig(name, moma=MoMaConfig(**OPTIONS[kind]))
    vit = ViTConfig(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    return VLM(
        VLMConfig(
            **dict(vocab_size=64, dim=16, num_layers=2, num_heads=4, max_seq_len=64),
            vision=VisionConfig(vit=vit),
            modalities={
                "image": ModalityConfig(first_id=63),
                "speech": ModalityConfig(first_id=40, num_ids=12, discrete=True),
            },
            fusion=fusion,
        )
    )


def rows() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tokens (2, 12): a row of text, and one of all modalities; and the images of each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 40, (2, 12), generator=generator)
    tokens[1, 2:6], tokens[1, 8:10] = 63, 45
    image = torch.randn(1, 3, 8, 8, generator=generator)
    return tokens, [image[:0], image]


def sharded_gradients(kind: str) -> dict[str, torch.Tensor]:
    """Gradients of both ranks' rows together, of a model sharded block by block."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, (tokens, images) = build(kind).train(), rows()
    for block in model.blocks():
        fully_shard(block)
    fully_shard(model)
    rank = dist.get_rank()
    model(tokens[rank : rank + 1], images=images[rank]).square().sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        whole: Any = parameter.grad
        found[name] = whole.full_tensor() * dist.get_world_size()  # FSDP takes the mean
    return found


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_rank_of_text_and_one_of_all_modalities(kind):
    model, (tokens, images) = build(kind).train(), rows()
    for row in range(2):
        model(tokens[row : row + 1], images=images[row]).square().sum().backward()
    for found in run_on_ranks(2, sharded_gradients, kind):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = (found[name] - parameter.grad).abs().max()
            assert error <= 1e-5 * parameter.grad.abs().max(), name
