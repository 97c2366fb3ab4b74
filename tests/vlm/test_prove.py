"""`prove` of models with images: each layout against one process, ranks without a picture beside ranks that have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_core import initialize
from forge_data import Ragged
from forge_parallel.prove import prove
from forge_vlm import VLM, FusionConfig, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.fusion import MoMaConfig
from forge_vlm.vision import ViTConfig, cut_patches

pytestmark = pytest.mark.distributed
VOCAB, IMAGE, PLACES = 64, 63, 4
FUSIONS = {
    "joint_decoder": FusionConfig(),
    "cross_attention": FusionConfig("cross_attention"),
    "mixture_of_transformers": FusionConfig("mixture_of_transformers"),
    "moma": FusionConfig("moma", moma=MoMaConfig(balance_loss=0.0)),
}


def build(fusion: str, encoder: str = "vit") -> VLM:
    vit = ViTConfig(image_size=8, patch_size=4, dim=16, num_layers=1, num_heads=2)
    config = VLMConfig(
        **{"vocab_size": VOCAB, "dim": 32, "num_layers": 2, "num_heads": 4, "init_std": 0.2},
        vision=VisionConfig(encoder, vit=vit),
        modalities={"image": ModalityConfig(first_id=IMAGE)},
        fusion=FUSIONS[fusion],
    )
    model = VLM(config)
    initialize(model, 0)
    for name, gate in model.named_parameters():
        if name.endswith("_gate"):
            torch.nn.init.constant_(gate, 0.5)
    return model


def pictures(tokens: Tensor, places: int) -> dict[str, Any]:
    """A picture in each row that begins with an id of the lower half: in "branch by row" in those of one rank alone."""
    tokens[tokens == IMAGE] = 1
    seen = tokens[:, 0] < VOCAB // 2
    tokens[seen, 1 : 1 + places] = IMAGE
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), seen.long().cumsum(0)])
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    images = torch.randint(0, 256, (int(seen.sum()), 3, 8, 8), generator=generator)
    return {"images": Ragged(images.to(torch.uint8), offsets)}


def four(tokens: Tensor) -> dict[str, Any]:
    return pictures(tokens, PLACES)


def shapes(tokens: Tensor) -> dict[str, Any]:
    """The same pictures as patches; every second one is a strip."""
    images = pictures(tokens, PLACES)["images"]
    sizes = [(8, 8), (4, 16)]
    cut = [
        cut_patches(image.reshape(1, 3, *sizes[n % 2]), 4, merge=1, time=1)
        for n, image in enumerate(images.values)
    ]
    none = torch.zeros(0, 48, dtype=torch.uint8), torch.zeros(0, 3, dtype=torch.int64)
    patches, grids = (torch.cat(tensors) for tensors in zip(none, *cut))
    offsets = images.row_offsets
    return {"patches": Ragged(patches, PLACES * offsets), "grids": Ragged(grids, offsets)}


def one(tokens: Tensor) -> dict[str, Any]:
    return pictures(tokens, 1)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", FUSIONS)
def test_ranks_that_branch_have_the_gradients_of_one_process(fusion: str) -> None:
    media = one if fusion == "cross_attention" else four
    (result,) = prove(
        lambda: build(fusion), media=media, vocab_size=VOCAB, only="branch", worlds=[2]
    )
    assert result.verdict == "green", result


@pytest.mark.slow
def test_a_joint_decoder_is_green_in_every_layout_of_two_ranks() -> None:
    results = prove(lambda: build("joint_decoder"), media=four, vocab_size=VOCAB, worlds=[2])
    assert {r.verdict for r in results} == {"green"}, [r for r in results if r.verdict != "green"]
    assert len(results) > 8


@pytest.mark.slow
def test_packed_images_of_several_shapes_are_green_in_every_layout_of_two_ranks() -> None:
    results = prove(
        lambda: build("joint_decoder", "packed_vit"), media=shapes, vocab_size=VOCAB, worlds=[2]
    )
    assert {r.verdict for r in results} == {"green"}, [r for r in results if r.verdict != "green"]
    assert len(results) > 8
