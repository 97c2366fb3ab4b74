"""Operations as the model counts them against those that torch sees in a forward and a backward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_core.flops import flops_per_token
from forge_testing.problems import rejects
from forge_vlm import (
    VLM,
    AdapterConfig,
    FusionConfig,
    ModalityConfig,
    VisionConfig,
    VLMConfig,
    adapters,
)
from forge_vlm.fusion import CrossAttentionConfig, MoMaConfig
from forge_vlm.vision import ViTConfig, build_encoder
from forge_vlm.vision.features import Features

pytestmark = pytest.mark.lane("test")

IMAGE, S, IMAGES = 63, 24, 2
VIT = VisionConfig(vit=ViTConfig(image_size=16, patch_size=4, dim=8, num_layers=2, num_heads=2))
POOL = AdapterConfig(
    "attentional_pool", attentional_pool=adapters.AttentionalPoolConfig(2, num_heads=2)
)
CROSS = FusionConfig("cross_attention", cross_attention=CrossAttentionConfig(every_n_layers=1))
FUSIONS = {
    "joint_decoder": FusionConfig(),
    "cross_attention": CROSS,
    "mixture_of_transformers": FusionConfig("mixture_of_transformers"),
    "moma": FusionConfig("moma", moma=MoMaConfig(num_experts=4, top_k=2, balance_loss=0.0)),
}


def model_of(fusion, **options):
    sizes = dict(vocab_size=64, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32)
    given = dict(vision=VIT, adapter=POOL, images_per_row=IMAGES, init_std=0.1)
    places = {"image": ModalityConfig(first_id=IMAGE)}
    return VLM(
        VLMConfig(**{**sizes, **given, **options}, modalities=places, fusion=FUSIONS[fusion])
    )


def counted(run):
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def step(model):
    """A forward and a backward of two rows of two images each."""
    each = 1 if model.cross else 4
    tokens = torch.randint(1, 60, (2, S), generator=torch.Generator().manual_seed(0))
    tokens[:, 2 : 2 + each] = tokens[:, 12 : 12 + each] = IMAGE
    model(tokens, images=torch.randn(2 * IMAGES, 3, 16, 16)).sum().backward()


def beside(model):
    """What torch computes and the count leaves out, less what it counts and torch need not compute, a token.

    The other half of causal scores, and gradients of pixels, or of features where nothing before them trains.
    """
    scores = 3 * 2 * 2 * S * 16
    frozen = not any(p.requires_grad for p in model.vision.parameters())
    patches = 16 * IMAGES / S
    if frozen:
        edge = 2 * 8 * 8 * (2 * 16 + 4) * IMAGES / S
    else:
        edge = 2 * model.vision.patches.weight.numel() * patches
    return scores - edge


@pytest.mark.parametrize("frozen", [(), ("vision.",), ("vision.", "layers.")], ids=str)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_operations_of_a_step_are_those_that_torch_computes(fusion, frozen):
    model = model_of(fusion)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    model.train()
    found = counted(lambda: step(model)) / (2 * S)
    assert flops_per_token(model, S) + beside(model) == pytest.approx(found, rel=1e-6)


def test_images_are_counted_as_often_as_rows_have_them():
    none, one, two = (
        flops_per_token(model_of("joint_decoder", images_per_row=n), S) for n in range(3)
    )
    assert none < one
    assert two - one == pytest.approx(one - none)
    assert none == flops_per_token(super_of(), S)


def super_of():
    from forge_core import Transformer, TransformerConfig

    sizes = dict(vocab_size=64, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32)
    return Transformer(TransformerConfig(**sizes))


ADAPTERS = {
    "linear": {},
    "mlp": {},
    "pixel_shuffle": {},
    "pixel_shuffle_mlp": {"pixel_shuffle_mlp": adapters.PixelShuffleMLPConfig(4)},
    "average_pool": {"average_pool": adapters.AveragePoolConfig(2)},
    "attentional_pool": {"attentional_pool": adapters.AttentionalPoolConfig(2, num_heads=2)},
    "resampler": {"resampler": adapters.ResamplerConfig(5, num_layers=2, num_heads=2)},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_operations_of_adapters(name):
    from forge_vlm.flops import work_of_media

    adapter = adapters.build_adapter(AdapterConfig(name, **ADAPTERS[name]), 8, 16)
    encoder = build_encoder(VIT)
    work = work_of_media(encoder, adapter, None)
    alone = encoder.image_work().flops
    features = Features(torch.randn(1, 16, 8), 4, 4)
    assert counted(lambda: adapter(features)) == work.flops - alone
    assert adapter(features).size(1) == work.tokens == adapter.tokens(4, 4)


SIZES = {
    "clip_vision_model": {"intermediate_size": 24, "image_size": 16, "patch_size": 4},
    "siglip_vision_model": {"intermediate_size": 24, "image_size": 16, "patch_size": 4},
    "internvl_vision": {"intermediate_size": 24, "image_size": [16, 16], "patch_size": [4, 4]},
    "idefics3_vision": {"intermediate_size": 24, "image_size": 16, "patch_size": 4},
    "dinov2_with_registers": {"image_size": 16, "patch_size": 4, "num_register_tokens": 3},
    "qwen3_vl_vision": {
        **{"depth": 3, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 16},
        **{"patch_size": 4, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    },
    "mllama_vision_model": {
        **{"intermediate_size": 24, "image_size": 16, "patch_size": 4, "num_global_layers": 1},
        **{"attention_heads": 2, "vision_output_dim": 32, "intermediate_layers_indices": [1]},
    },
}


@pytest.mark.parametrize("kind", SIZES)
def test_operations_of_encoders_of_transformers(kind):
    pytest.importorskip("transformers")
    keys = {"model_type": kind, "hidden_size": 16, **SIZES[kind]}
    if kind != "qwen3_vl_vision":
        keys |= {"num_hidden_layers": 2}
    if kind not in ("qwen3_vl_vision", "mllama_vision_model"):
        keys |= {"num_attention_heads": 2}
    feature = "cls_patch" if kind == "mllama_vision_model" else "patch"
    vision = VisionConfig("transformers", transformers=keys, select_feature=feature)
    encoder = build_encoder(vision)
    work = encoder.image_work(16**2)
    media = encoder.dummy("cpu")
    if kind == "qwen3_vl_vision":  # 2 x 2 tokens of 2 x 2 patches
        media = {
            "patches": torch.zeros(16, encoder.patch_width),
            "grids": torch.tensor([[1, 4, 4]]),
        }
    with torch.no_grad():
        found = counted(lambda: encoder(**media))
        assert encoder(**media).tokens.size(1) == work.tokens
    masks = 2 * 96**2 if kind == "mllama_vision_model" else 0  # a product makes them
    assert work.flops == found - masks


def test_images_of_any_size_are_counted_in_the_size_of_the_config():
    pytest.importorskip("transformers")
    keys = {"model_type": "qwen3_vl_vision", "hidden_size": 16, **SIZES["qwen3_vl_vision"]}
    vision = VisionConfig("transformers", transformers=keys)
    found = [
        model_of("joint_decoder", vision=vision, adapter=AdapterConfig("none"), pixels_per_image=n)
        for n in (None, 512**2, 1024**2)
    ]
    first, same, larger = (model.image_work() for model in found)
    assert first == same
    assert larger.tokens == 4 * same.tokens
    with rejects("pixels_per_image", 64, "foreign"):
        model_of("joint_decoder", pixels_per_image=64)
