"""Media that an encoder would take for others: they were computed without a word, or ended in an error of torch."""

import pytest
import torch

from forge_testing.problems import rejects
from forge_vlm import VLM, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm.adapters import AdapterConfig, PixelShuffleConfig, build_adapter
from forge_vlm.data.options import fit_problems
from forge_vlm.vision import ViTConfig, build_encoder, cut_patches

pytestmark = pytest.mark.lane("test")

KEYS = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def vit(**options):
    sizes = dict(image_size=16, patch_size=4, dim=8, num_layers=1, num_heads=2)
    return VisionConfig(**options, vit=ViTConfig(**sizes))


def of_transformers(kind, **options):
    pytest.importorskip("transformers")
    keys = {**KEYS, "model_type": kind, "image_size": 16, "patch_size": 4}
    return VisionConfig("transformers", transformers=keys, **options)


@pytest.mark.parametrize("kind", ["vit", "siglip_vision_model"])
@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (1, 3, 32, 8), (1, 3, 17, 17), (1, 1, 16, 16)])
def test_images_of_another_size_than_the_positions_are_rejected(kind, shape):
    """One patch had all sixteen positions, and 8 * 2 patches those of 4 * 4."""
    encoder = build_encoder(vit() if kind == "vit" else of_transformers(kind))
    assert encoder(images=torch.zeros(2, 3, 16, 16)).tokens.shape[:2] == (2, 16)
    with rejects("images", shape, "shape"):
        encoder(images=torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_integers_that_are_no_bytes_are_rejected(dtype):
    """They were taken as floats that are normalized already: a white pixel was 255, not 1."""
    with rejects("images", dtype, "dtype"):
        build_encoder(vit())(images=torch.ones(1, 3, 16, 16, dtype=dtype))


@pytest.mark.parametrize("images", [None, [torch.zeros(3, 16, 16)]])
def test_inputs_that_are_no_tensor_are_rejected(images):
    with rejects("media", type(images).__name__, "type"):
        build_encoder(vit())(images=images)


def test_the_class_token_of_a_head_is_not_among_the_features():
    """AIMv2 has one in the pooling behind its blocks: the first patch was left out for it."""
    encoder = build_encoder(of_transformers("aimv2_vision_model", select_feature="patch"))
    features = encoder(images=torch.zeros(2, 3, 16, 16))
    assert (features.tokens.shape, features.rows, features.columns) == ((2, 16, 32), 4, 4)
    assert encoder.image_work().tokens == 16


def test_data_counts_the_class_token_of_an_encoder():
    """It was looked up under a name that no encoder has, so that no tokens_per_tile fitted CLIP with cls_patch."""
    vision = of_transformers("clip_vision_model")
    sizes = dict(vocab_size=64, dim=16, num_layers=1, num_heads=2)
    model = VLM(VLMConfig(**sizes, vision=vision, modalities={"image": ModalityConfig(63)}))
    options = {"positions": "sequential", "resolution": {"fixed": {"size": 16}}}
    assert model.vision(images=torch.zeros(1, 3, 16, 16)).tokens.size(1) == 17
    assert fit_problems({**options, "tokens_per_tile": 17}, 63, model, "x") == []
    (problem,) = fit_problems({**options, "tokens_per_tile": 16}, 63, model, "x")
    assert (problem.key, problem.code) == ("x.tokens_per_tile", "tokens")


def test_images_that_an_encoder_packs_come_back_one_by_one():
    """Pixtral gives (1, N T, W), which adapters of windows took for one image of 4 * 4."""
    encoder = build_encoder(of_transformers("pixtral")).eval()
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    factor = AdapterConfig("pixel_shuffle", pixel_shuffle=PixelShuffleConfig(factor=2))
    adapter = build_adapter(factor, encoder.width, 8)
    with torch.no_grad():
        found = adapter(encoder(images=images))
        alone = [adapter(encoder(images=image[None])) for image in images]
    torch.testing.assert_close(found, torch.cat(alone))


def test_F213_parameters_without_elements_are_buffers():
    """DINOv3 without registers has register tokens (1, 0, W), whose gradient FSDP2 cannot reduce."""
    encoder = build_encoder(of_transformers("dinov3_vit"))
    assert all(parameter.numel() for parameter in encoder.parameters())
    name = "model.embeddings.register_tokens"
    assert dict(encoder.named_buffers())[name].shape == encoder.state_dict()[name].shape
    assert name in encoder.init_table(0.02, 0.02)
    assert encoder(images=torch.zeros(2, 3, 16, 16)).tokens.shape == (2, 17, 32)


def test_an_encoder_that_is_not_computed_is_rejected_by_name():
    pytest.importorskip("transformers")
    keys = {**KEYS, "model_type": "siglip2_vision_model", "patch_size": 4}
    with rejects("vision.transformers.model_type", keys["model_type"], "no_image_size"):
        build_encoder(VisionConfig("transformers", transformers=keys))


@pytest.mark.parametrize(
    "grids", [torch.tensor([1, 4, 4]), torch.ones(1, 3), torch.ones(1, 2).long()]
)
def test_grids_of_another_shape_are_rejected(grids):
    encoder = build_encoder(vit(name="packed_vit"))
    patches, _ = cut_patches(torch.zeros(1, 3, 16, 16), patch_size=4, merge=1, time=1)
    with rejects("grids", tuple(grids.shape), "shape"):
        encoder(patches=patches, grids=grids)


def test_document_ids_of_another_shape_are_rejected():
    model = VLM(
        VLMConfig(
            vocab_size=64,
            dim=16,
            num_layers=1,
            num_heads=2,
            vision=vit(),
            modalities={"image": ModalityConfig(first_id=63)},
        )
    )
    with rejects("document_ids", (2, 9), "shape"):
        model(torch.ones(2, 10).long(), document_ids=torch.zeros(2, 9).long())
