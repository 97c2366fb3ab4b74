"""What a user of models and encoders may get wrong: the problem names the key, the value and the rule."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forge_core import TransformerConfig
from forge_core.model import MRopeConfig
from forge_testing.problems import assert_problem, rejects
from forge_vlm import VLM, FusionConfig, ModalityConfig, VisionConfig, VLMConfig
from forge_vlm._shared.problems import ProblemError
from forge_vlm.experimental.chameleon import ChameleonAttention
from forge_vlm.families import module_name
from forge_vlm.families.check_inputs import inputs_of
from forge_vlm.fusion import MoMaConfig
from forge_vlm.fusion.config import require_full_sequences
from forge_vlm.fusion.cross_attention import check_images
from forge_vlm.sequence.masks import build_mask
from forge_vlm.vision import (
    ViTConfig,
    build_encoder,
    encoder_differences,
    encoder_tensors,
    find_encoder,
    pixel_differences,
)
from forge_vlm.vision.features import Features, select
from forge_vlm.vision.transformers import build_config

pytestmark = pytest.mark.lane("test")

SIZES = dict(vocab_size=64, dim=16, num_layers=2, num_heads=2)
EXPERTS_CHOOSE = FusionConfig("moma", moma=MoMaConfig("expert_choice"))
CLIP = {"model_type": "clip_vision_model", "image_size": 16}
TOKENS = torch.ones(1, 4, dtype=torch.int64)


def vit(**options):
    sizes = dict(image_size=8, patch_size=4, dim=8, num_layers=1, num_heads=2)
    return ViTConfig(**{**sizes, **options})


def model_of(**options):
    modalities = {"image": ModalityConfig(63)}
    given = {**SIZES, "vision": VisionConfig(vit=vit()), "modalities": modalities}
    return VLM(VLMConfig(**{**given, **options}))


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [("patch_size", 3, "divides"), ("num_heads", 3, "divides"), ("dim", 0, "size")],
)
def test_sizes_of_an_encoder(key, value, code):
    with rejects(key, value, code):
        vit(**{key: value})


@pytest.mark.parametrize(
    ("name", "options", "key", "value", "code"),
    [
        ("clip", {}, "name", "clip", "unknown"),
        ("mine:encoder", {"vit": ViTConfig(dim=8)}, "vit.dim", 8, "foreign"),
        ("vit", {"transformers": CLIP}, "transformers", ..., "foreign"),
        ("transformers", {"transformers": {}}, "transformers.model_type", None, "type"),
        ("vit", {"options": {"a": 1}}, "options", ..., "foreign"),
        ("vit", {"select_layer": (-2.0,)}, "select_layer", (-2.0,), "type"),
        ("vit", {"select_feature": "cls"}, "select_feature", "cls", "unknown"),
        ("vit", {"mean": (0.5,)}, "mean", (0.5,), "range"),
        ("vit", {"std": (0.5, 0.5, 0.0)}, "std", (0.5, 0.5, 0.0), "range"),
    ],
)
def test_keys_of_encoders(name, options, key, value, code):
    with rejects(key, value, code):
        VisionConfig(name, **options)


@pytest.mark.parametrize(
    ("keys", "key", "value", "code"),
    [
        (
            {"model_type": "none"},
            *("vision.transformers.model_type", "none", "unknown"),
        ),
        ({**CLIP, "deep": 1}, "vision.transformers.deep", 1, "unknown_key"),
    ],
)
def test_keys_of_transformers(keys, key, value, code):
    pytest.importorskip("transformers")
    with rejects(key, value, code):
        build_config(keys)


def test_encoders_of_transformers_need_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with rejects("vision.name", "transformers", "requires"):
        build_config(CLIP)


@pytest.mark.parametrize("kind", ["qwen3_vl_vision", "mllama_vision_model"])
def test_encoders_that_select_their_own_layers(kind):
    pytest.importorskip("transformers")
    config = VisionConfig("transformers", transformers={"model_type": kind}, select_layer=(-2,))
    value = (-2,) if kind == "qwen3_vl_vision" else ((-2,), "cls_patch")
    with rejects("vision.select_layer", value, "foreign"):
        build_encoder(config)


def test_hidden_states_that_an_encoder_does_not_have():
    states = [torch.zeros(1, 4, 8)] * 3
    with rejects("vision.select_layer", (3,), "range"):
        select(states, states[-1], VisionConfig(select_layer=(3,)), front=0)


def test_folders_of_other_encoders():
    pytest.importorskip("transformers")
    with rejects("", ..., "missing"):
        encoder_tensors(["a.weight", "b.weight"], ["model.c.weight"])
    with rejects("", ..., "incomplete"):
        encoder_tensors(["a.weight", "b.weight"], ["model.a.weight"])
    config = VisionConfig("transformers", transformers=CLIP)
    for hf, key, value in (
        ({"model_type": "siglip_vision_model"}, "model_type", CLIP["model_type"]),
        ({**CLIP, "image_size": 32}, "image_size", 16),
    ):
        found = ProblemError(encoder_differences(config, {"vision_config": hf}))
        assert_problem(found, f"vision.transformers.{key}", value, "differs")
    here, there = {"w": torch.zeros(2)}, {"front.w": torch.zeros(3)}
    with rejects("front.w", (3,), "shape"):
        find_encoder(config, here, {"vision_config": CLIP}, {}, there)
    assert find_encoder(config, here, {"vision_config": CLIP}, {}, here) == {"w": "w"}
    config = VisionConfig(mean=(0.5,) * 3, std=(0.5,) * 3)
    assert not pixel_differences(config, {"image_mean": [0.5] * 3})
    found = ProblemError(pixel_differences(config, {"image_mean": [0.1] * 3}))
    assert_problem(found, "vision.mean", [0.5] * 3, "processor")


def test_families_whose_modules_are_unknown():
    assert module_name("llava", "vision_tower.a") == "model.vision_tower.a"
    with rejects("", "chameleon", "adapter"):
        module_name("chameleon", "")


def test_rows_without_room_for_an_image():
    class Vision(torch.nn.Module):
        extra_inputs = ("images",)

        def dummy(self, device):
            return {"images": torch.zeros(1, 3, 2, 2)}

        def forward(self, images):
            return images

    model = SimpleNamespace(vision=Vision(), adapter=lambda features: torch.zeros(1, 8, 4))
    places = {"image": SimpleNamespace(first_id=0)}
    short = SimpleNamespace(placeholders=places, vocab_size=8, max_seq_len=8)
    theirs = SimpleNamespace(config=SimpleNamespace(model_type="llava"))
    with rejects("", ..., "length"):
        inputs_of(model, short, theirs)


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"mixer": "mla"}, "mrope", ...),
        ({"mrope": MRopeConfig((1, 1, 1))}, "mrope.sections", [1, 1, 1]),
    ],
)
def test_positions_of_three_axes_need_their_attention(options, key, value):
    given = {"positions": "mrope", "mrope": MRopeConfig((2, 1, 1)), **options}
    with rejects(key, value):
        VLMConfig(**SIZES, modalities={"image": ModalityConfig(63)}, **given)


def test_norms_are_not_doubled():
    with rejects("qk_norm", True, "excludes"):
        ChameleonAttention(TransformerConfig(**SIZES, qk_norm=True), 0)


def test_rows_that_experts_choose_from_are_not_split():
    with rejects("fusion.moma.router", "expert_choice", "split_rows"):
        require_full_sequences(EXPERTS_CHOOSE)


def test_features_that_blocks_of_cross_attention_do_not_read():
    here, tokens = torch.zeros(1, 4, dtype=torch.bool), torch.zeros(1, 4, 8)
    features = Features(tokens, layers=(tokens[0],))
    with rejects("fusion.name", "cross_attention", "layers"):
        check_images(here, features, 1, None, None)
    with rejects("fusion.name", "cross_attention", "packed"):
        check_images(here, Features(tokens), 2, None, None)


def test_a_mixer_that_takes_no_mask():
    blocks = nn.ModuleDict({"cross_1": nn.Identity(), "1": nn.Identity()})
    with rejects("layers.1", ..., "mask"):
        build_mask(blocks, None, TOKENS, None)


class Reading(nn.Module):
    """An encoder that reads values of its images."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def media_of(self, images, pixels, device):
        return {}

    def forward(self):
        raise RuntimeError("a data-dependent number")


@pytest.mark.parametrize(
    ("options", "vision", "key", "value"),
    [
        ({"fusion": EXPERTS_CHOOSE}, None, "fusion.moma.router", "expert_choice"),
        ({}, nn.Identity(), "vision.name", "vit"),
        ({}, Reading(), "vision.transformers.model_type", None),
    ],
)
def test_models_that_cannot_be_planned(options, vision, key, value):
    model = model_of(**options)
    if vision is not None:
        model.vision = vision
    with rejects(key, value, "planned"):
        model.plan_forward(TOKENS)
